"""Modules that growth left unfinished: as plain modules they are others than were trained, which ``export`` must say.

They carry no mark. What is noted is forgotten with the module, and once other weights are put into it.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn

_NOTES: "WeakKeyDictionary[nn.Module, tuple[str, list[int]]]" = WeakKeyDictionary()


def note(part: nn.Module, text: str | None) -> None:
    """Say what is unfinished of ``part``, or, with None, that nothing is."""
    if text is None:
        _NOTES.pop(part, None)
    else:
        _NOTES[part] = text, _versions(part.modules())


def note_of(module: nn.Module) -> str | None:
    """What was said of ``module`` or a part of it, if it still has the weights of which it was said."""
    for m in module.modules():
        if m in _NOTES and _NOTES[m][1] == _versions(m.modules()):
            return _NOTES[m][0]
    return None


def _versions(modules: Iterable[nn.Module]) -> list[int]:
    return [p._version for m in modules for p in m.parameters(recurse=False)]
