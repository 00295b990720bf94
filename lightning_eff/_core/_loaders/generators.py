"""Find the random generators that a data set, its transforms or a collate function hold."""

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor

from lightning_eff._core._loaders.sampler_state import generator_state, is_generator, set_generator
from lightning_eff._core._run.stateful_loaders import is_nodes, node_parts

_MOST = 64  # entries of a container to search, because longer ones hold data
_ALL = 2000  # objects to search


class DataGenerators:
    """The generators behind the samples of these loaders, which draw independently of the global state.

    Args:
        loaders: the objects whose ``dataset`` and ``collate_fn`` are searched, or what their nodes hold.
    """

    def __init__(self, loaders: Iterable[Any]) -> None:
        self._loaders = list(loaders)

    def _found(self) -> list[Any]:
        looking = deque(getattr(loader, name, None) for loader in self._loaders for name in ("dataset", "collate_fn"))
        looking += [part for loader in self._loaders if is_nodes(loader) for part in node_parts(loader)]
        seen: dict[int, Any] = {}  # by id, of living objects
        while looking and len(seen) < _ALL:
            value = looking.popleft()
            if id(value) not in seen:
                seen[id(value)] = value
                looking += _parts(value)
        return [value for value in seen.values() if is_generator(value)]

    def __bool__(self) -> bool:
        return bool(self._found())

    def states(self) -> list[dict[str, Any]]:
        """Return the states of the generators, in the order of the search."""
        return [generator_state(one) for one in self._found()]

    def set(self, states: Iterable[dict[str, Any]]) -> None:
        """Restore :meth:`states`."""
        for one, state in zip(self._found(), states, strict=False):
            set_generator(one, state)


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of ``value`` that may hold a generator."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return parts if len(value) <= _MOST else ()
    if isinstance(value, Tensor | type | ModuleType) or not hasattr(value, "__dict__"):
        return ()
    return tuple(vars(value).values())
