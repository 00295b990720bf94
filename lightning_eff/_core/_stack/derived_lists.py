"""State that a module derives once from its blocks, such as a list of attention layers, while only some blocks are shown."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_eff._core._lightning.names import ROOTS

_MISSING = object()
_MANY = 20_000  # the maximum number of objects searched for references
_LIBRARIES = ("torch", *ROOTS, "transformers", "numpy", "builtins")


def hooks_so_far() -> int:
    """Return the key that torch will give to the next hook of any module."""
    return RemovableHandle.next_id


def hooked_since(block: nn.Module, key: int) -> bool:
    """Return whether ``block`` or a part of it has a hook registered since :func:`hooks_so_far` returned ``key``."""
    if hooks_so_far() == key:
        return False
    return any(
        at >= key
        for m in block.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        for at in hooks
    )


def referred(value: Any, index: dict[int, int]) -> set[int]:
    """Return the blocks to which ``value`` refers, directly or through lists, closures and plain objects.

    Args:
        value: any object.
        index: the number of a block by the ids of its parts.
    """
    found: set[int] = set()
    seen: set[int] = set()
    todo = [value]
    while todo and len(seen) < _MANY:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if id(v) in index:
            found.add(index[id(v)])
        else:
            todo.extend(_within(v))
    return found


def _within(v: Any) -> Iterable[Any]:
    """Return the objects in ``v``."""
    if isinstance(v, nn.Module):
        return v._modules.values()
    if isinstance(v, list | tuple | set | frozenset | deque):
        return v
    if isinstance(v, dict):
        return (*v.keys(), *v.values())
    if isinstance(v, functools.partial):
        return (v.func, *v.args, *v.keywords.values())
    if isinstance(v, types.MethodType):
        return (v.__self__, v.__func__)
    if isinstance(v, types.FunctionType):
        return [cell.cell_contents for cell in v.__closure__ or () if _filled(cell)]
    if isinstance(v, weakref.ref):
        return (v(),)
    if isinstance(v, Tensor | type) or type(v).__module__.partition(".")[0] in _LIBRARIES:
        return ()
    return getattr(v, "__dict__", {}).values()


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class Made:
    """Attributes outside of the blocks that came to refer to blocks while only the first ``active`` were shown.

    They are caches of a network with fewer blocks. :meth:`forget` restores the previous values, so that the module computes
    them again. Caches of methods with ``functools.cache`` are cleared too.
    """

    def __init__(self, root: nn.Module, blocks: list[nn.Module], active: int) -> None:
        self._active = active
        owners: dict[int, set[int]] = {}
        for i, block in enumerate(blocks):
            for part in (*block.modules(), *block.parameters(), *block.buffers()):
                owners.setdefault(id(part), set()).add(i)
        self._index = {part: min(where) for part, where in owners.items() if len(where) == 1}
        inside = {id(m) for block in blocks for m in block.modules()}
        self._outside = [m for m in root.modules() if id(m) not in inside]
        self._before: list[tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = []
        self._kept: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._grown: dict[int, tuple[Any, int]] = {}

    def begin(self) -> None:
        """Note the attributes at the start of a step."""
        spaces = [m.__dict__ for m in self._outside]
        self._before = [
            (space, dict(space), {k: len(v) for k, v in space.items() if _counts(k, v)}) for space in spaces
        ]

    def end(self) -> None:
        """Find the attributes that came to refer to the shown blocks during the step."""
        for space, before, sizes in self._before:
            for name, value in space.items():
                old = before.get(name, _MISSING)
                if value is not old:
                    if self._of_these(value):
                        self._kept.setdefault((id(space), name), (space, name, old))
                elif name in sizes and len(value) > sizes[name] and self._of_these(list(_tail(value, sizes[name]))):
                    self._grown.setdefault(id(value), (value, sizes[name]))
        self._before = []

    def _of_these(self, value: Any) -> bool:
        found = referred(value, self._index)
        return bool(found) and max(found) < self._active

    def forget(self) -> None:
        """Restore the previous values."""
        for value, size in self._grown.values():
            for key in list(_tail(value, size, keys=True))[::-1]:
                if isinstance(value, list | deque):
                    value.pop()
                elif isinstance(value, dict):
                    value.pop(key, None)
                else:
                    value.discard(key)
        for space, name, old in self._kept.values():
            if old is _MISSING:
                space.pop(name, None)
            else:
                space[name] = old
        self._kept, self._grown = {}, {}
        for cls in {cls for m in self._outside for cls in type(m).__mro__}:
            if cls.__module__.partition(".")[0] not in _LIBRARIES:
                for value in list(vars(cls).values()):
                    if isinstance(value, functools._lru_cache_wrapper):
                        value.cache_clear()


def _counts(name: str, value: Any) -> bool:
    """Return whether an attribute is a container that a module may fill, and not its own table of hooks or tensors."""
    if type(value) not in (list, dict, set, deque):
        return False
    return name == "_modules" or not (name.startswith("_") and name in _OWN)


_OWN = frozenset(nn.Module().__dict__)


def _tail(value: Any, size: int, *, keys: bool = False) -> Iterator[Any]:
    """Yield the entries of a container after the first ``size``; for a set, which has no order, all entries."""
    entries = value if isinstance(value, list | deque | set) or keys else value.items()
    for position, entry in enumerate(entries):
        if position >= size or (isinstance(value, set) and not size):
            yield entry
