"""Track which row of a layer's output each entry of a tensor made from logits belongs to, without the logits.

Logits (n, V) are rows of V classes. Operations that move them (shifts, reshapes, transpositions, selections) run on a tensor of
the same shape on the "meta" device, without data. Its strides tell which rows are where. Copies, and selections by a mask or by
indices, start again with a list of rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Operations that return views of their first argument, or copies in the same order where no view exists.
MOVING = frozenset((
    "T", "alias", "broadcast_to", "chunk", "clone", "contiguous", "expand", "expand_as", "flatten", "getitem", "mT",
    "moveaxis", "movedim", "narrow", "permute", "ravel", "reshape", "select", "split", "split_with_sizes", "squeeze",
    "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view",
))  # fmt: skip
_COPIES = frozenset(("clone", "contiguous"))
_MAY_COPY = frozenset(("flatten", "ravel", "reshape"))


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the operations inside, on tensors without data, from all modes and tensor subclasses."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@dataclass(frozen=True)
class Rows:
    """The rows in a tensor of logits.

    Attributes:
        layout: a tensor without data, of the logits' shape, a view of a contiguous one (n, V).
        at: its dimension of classes.
        index: the row of the layer's output for each of the n, (n,); None if they are its rows in order.
        once: whether no row occurs twice.
    """

    layout: Tensor
    at: int
    index: Tensor | None = None
    once: bool = True

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return self.layout.shape

    @property
    def outer(self) -> tuple[int, ...]:
        """The shape without the dimension of classes."""
        return tuple(size for dim, size in enumerate(self.layout.shape) if dim != self.at)

    @property
    def classes(self) -> int:
        """V."""
        return self.layout.shape[self.at]

    @property
    def _strides(self) -> tuple[int, ...]:
        """The strides of the rows, in rows, for :attr:`outer`."""
        pairs = enumerate(zip(self.layout.shape, self.layout.stride(), strict=True))
        return tuple(0 if size == 1 else stride // self.classes for dim, (size, stride) in pairs if dim != self.at)

    @property
    def straight(self) -> bool:
        """Whether it holds all rows of the layer's output in order."""
        if self.index is not None or self.layout.storage_offset():
            return False
        expected = 1
        for size, stride in reversed(list(zip(self.outer, self._strides, strict=True))):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * self.classes == _root(self.layout).numel()

    def indices(self, device: torch.device) -> Tensor:
        """Return the row of the layer's output for each entry, int64, shape :attr:`outer`."""
        count = _root(self.layout).numel() // self.classes
        first = self.layout.storage_offset() // self.classes
        found = torch.arange(count, device=device).as_strided(self.outer, self._strides, first)
        return found if self.index is None else self.index[found]


def begin(shape: tuple[int, ...]) -> Rows:
    """Return the rows of a layer's output (..., V)."""
    with _unseen():
        return Rows(torch.empty(shape, device="meta"), len(shape) - 1)


def moved(rows: Rows, name: str, func: Any, args: tuple[Any, ...], kwargs: Any, device: torch.device) -> Any:
    """Return the rows of the result of ``func`` on logits: a :class:`Rows`, or a list of them; None if unknown.

    Args:
        rows: the rows of the logits.
        name: the name of the operation, one of :data:`MOVING`.
        func: the operation.
        args: its arguments after the logits.
        kwargs: its keyword arguments.
        device: the device of the logits.
    """
    if name in _COPIES:
        return _anew(rows, device)
    if name == "getitem" and _selects(args[0]):
        return _picked(rows, args[0], device)
    found = _viewed(rows, func, args, kwargs)
    if found is None and name in _MAY_COPY:
        found = _viewed(_anew(rows, device), func, args, kwargs)
    return found


def _root(layout: Tensor) -> Tensor:
    return layout if layout._base is None else layout._base


def _viewed(rows: Rows, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    try:
        with _unseen():
            made = func(rows.layout, *args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):  # plain logits raise the right error, or work
        return None
    found = [_read(rows, layout) for layout in ([made] if isinstance(made, Tensor) else made)]
    if any(one is None for one in found):
        return None
    return found[0] if isinstance(made, Tensor) else found


def _read(rows: Rows, layout: Tensor) -> Rows | None:
    """Return the rows of a view of the layout, if all its classes are in one dimension."""
    classes = rows.classes
    if _root(layout) is not _root(rows.layout) or layout.dtype != rows.layout.dtype:
        return None
    dims = list(enumerate(zip(layout.shape, layout.stride(), strict=True)))
    at = [dim for dim, (size, stride) in dims if size == classes and stride == 1]
    others = [(size, stride) for dim, (size, stride) in dims if dim not in at and size != 1]
    if len(at) != 1 or layout.storage_offset() % classes or any(stride % classes for _, stride in others):
        return None
    return replace(rows, layout=layout, at=at[0], once=rows.once and all(stride for _, stride in others))


def _anew(rows: Rows, device: torch.device) -> Rows:
    """Return the same rows as in a copy: consecutive, with the dimension of classes unchanged."""
    with _unseen():
        layout = torch.empty((*rows.outer, rows.classes), device="meta").movedim(-1, rows.at)
    index = None if rows.straight else rows.indices(device).flatten()
    return replace(rows, layout=layout, index=index)


def _selects(index: Any) -> bool:
    """Return whether an index selects by masks or indices, rather than by slices and positions."""
    return any(isinstance(one, Tensor | list) for one in (index if isinstance(index, tuple) else (index,)))


def _picked(rows: Rows, index: Any, device: torch.device) -> Rows | None:
    items = list(index) if isinstance(index, tuple) else [index]
    if rows.at != len(rows.shape) - 1 or any(isinstance(one, bool | list) for one in items):
        return None
    if any(isinstance(one, Tensor) and (one.ndim == 0 or type(one) is not Tensor) for one in items):
        return None
    taken = [0 if one is None or one is Ellipsis else _dims(one) for one in items]
    if any(one is Ellipsis for one in items):
        place = next(i for i, one in enumerate(items) if one is Ellipsis)
        items[place : place + 1] = [slice(None)] * (len(rows.shape) - sum(taken))
        taken[place : place + 1] = [1] * (len(rows.shape) - sum(taken))
    if sum(taken) > len(rows.shape) - 1:  # the classes too
        if not (isinstance(items[-1], slice) and items[-1] == slice(None)):
            return None
        items.pop()
    found = rows.indices(device)[tuple(items)]
    with _unseen():
        layout = torch.empty((*found.shape, rows.classes), device="meta")
    once = rows.once and all(one.dtype == torch.bool for one in items if isinstance(one, Tensor))
    return Rows(layout, layout.ndim - 1, found.flatten(), once)


def _dims(one: Any) -> int:
    return one.ndim if isinstance(one, Tensor) and one.dtype == torch.bool else 1
