"""Tensors that blocks store in their own attributes, and whether the module reads them afterwards."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_eff._core._stack.partial_views import Worn, put_on, take_off, worn_by

_OWN = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque)


class _Left(Worn):
    """Mixed into a part of a block that stored tensors in its attributes, to record who reads them."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name not in _OWN:
            worn_by(self).read(self, name)  # pyright: ignore[reportArgumentType]
        return super().__getattribute__(name)


class Leavings:
    """The attributes with tensors that some blocks set while they run, and reads of them from outside.

    Attributes:
        reads: the index of the block, by the dotted path of an attribute that was read.
    """

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.reads: dict[str, int] = {}
        self._paths = {
            id(m): f"{path}.{name}" if name else path for path, b in blocks.items() for name, m in b.named_modules()
        }
        self._before: dict[int, list[tuple[nn.Module, dict[str, Any], dict[str, int]]]] = {}
        self._left: dict[int, tuple[nn.Module, dict[str, int]]] = {}

    def enter(self, index: int, block: nn.Module) -> None:
        """Note the attributes of a block before it runs."""
        parts = [*block.modules()]
        spaces = [(m, dict(object.__getattribute__(m, "__dict__"))) for m in parts]
        self._before[index] = [
            (m, space, {k: len(v) for k, v in space.items() if type(v) in _CONTAINERS}) for m, space in spaces
        ]

    def leave(self, index: int) -> None:
        """Find the attributes with tensors that the block has set."""
        for m, before, sizes in self._before.pop(index, ()):
            after = object.__getattribute__(m, "__dict__")
            new = [
                name
                for name, value in after.items()
                if name not in _OWN
                and (value is not before.get(name) or (name in sizes and len(value) > sizes[name]))
                and any(isinstance(t, Tensor) for t in tree_leaves(list(value) if isinstance(value, set) else value))
            ]
            if not new:
                continue
            if id(m) not in self._left and not isinstance(m, Worn):
                self._left[id(m)] = (m, {})
                put_on(m, _Left, self)  # pyright: ignore[reportArgumentType] -- asked for reads alone
            if id(m) in self._left:
                self._left[id(m)][1].update(dict.fromkeys(new, index))

    def read(self, part: nn.Module, name: str) -> None:
        """Record that an attribute is read, except by its own block or in the backward pass."""
        index = self._left.get(id(part), (part, {}))[1].get(name)
        if index is not None and index not in self._before and torch._C._current_graph_task_id() == -1:
            self.reads.setdefault(f"{self._paths[id(part)]}.{name}", index)

    def end(self) -> None:
        """Restore the class of each part after the pass."""
        for m, _ in self._left.values():
            take_off(m)  # pyright: ignore[reportArgumentType]
        self._left, self._before = {}, {}
