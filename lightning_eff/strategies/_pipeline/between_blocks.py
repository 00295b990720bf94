"""Finds the operation between two blocks that computes the hidden state, so that it can return a received tensor instead.

In ``x = x * s + block(x)`` the caller computes ``x * s`` before it calls the block. So ``x`` must already be the received
tensor. It is either the result of the block before, or of one of the caller's operations after that block. A pass without
blocks finds out which.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

RETURNED = -1
"""The caller passes a block the result of the one before."""


class _Became(torch.autograd.Function):
    """Replaces a tensor by another one for all its references."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        tensor.data = other.data
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, or 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def become(tensor: Tensor, other: Tensor) -> bool:
    """Replace ``tensor``, the result of an in-place operation, by ``other``; return False if this is impossible."""
    if tensor._is_view() or (tensor.is_leaf and tensor.requires_grad) or tensor.dtype != other.dtype:
        return False
    if not torch.is_grad_enabled():
        tensor.data = other.data
    else:
        tensor.detach_()
        _Became.apply(tensor, other)
    return True


class Between(TorchFunctionMode):
    """Counts the operations from one block's return to the next one's call in a step.

    Args:
        at: the number of the operation whose result is replaced; None to find it.

    Attributes:
        placed: the replaced tensor and its version.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self._instead = at, None
        self.placed: tuple[Tensor, int] | None = None
        self._returned: Tensor | None = None
        self._results: list[Any] | None = None
        self._count = 0

    def after(self, returned: Tensor, instead: Tensor | None = None) -> None:
        """Note that a block returned; ``instead`` replaces the result of the operation ``at`` before the next block."""
        self._returned, self._instead, self._results, self._count = returned, instead, [], 0

    def before(self, hidden: Tensor) -> int | None:
        """Return the number of the operation that computed ``hidden`` of a block's call, :data:`RETURNED`, or None."""
        results, returned = self._results, self._returned
        self._results = self._returned = self._instead = None
        if results is None:
            return None
        made = [i for i, result in enumerate(results) if result is hidden]
        return made[-1] if made else RETURNED if hidden is returned else None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._results is None:
            return result
        if self._instead is not None and self._count == self.at and isinstance(result, Tensor):
            if not any(result is value for value in args):
                result = self._instead
                self.placed = result, version_of(result)
            elif become(result, self._instead):
                self.placed = result, version_of(result)
        self._results.append(result if self.at is None else None)
        self._count += 1
        return result
