"""Modules whose growth is unfinished: as plain modules they differ from the trained ones, which ``export`` must report.

The modules carry no mark. A note disappears with its module, and when other weights are loaded into it.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn

_NOTES: "WeakKeyDictionary[nn.Module, tuple[str, list[int]]]" = WeakKeyDictionary()


def note(part: nn.Module, text: str | None) -> None:
    """Note what is unfinished in ``part``; None removes the note."""
    if text is None:
        _NOTES.pop(part, None)
    else:
        _NOTES[part] = text, _versions(part.modules())


def note_of(module: nn.Module) -> str | None:
    """Return the note on ``module`` or a part of it, if the weights have not changed since."""
    for m in module.modules():
        if m in _NOTES and _NOTES[m][1] == _versions(m.modules()):
            return _NOTES[m][0]
    return None


def _versions(modules: Iterable[nn.Module]) -> list[int]:
    return [p._version for m in modules for p in m.parameters(recurse=False)]
