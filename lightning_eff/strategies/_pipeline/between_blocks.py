"""What the caller of the blocks does between two of them, so that a received hidden state is its own variable's value.

Of ``x = x * s + block(x)`` the caller computes ``x * s`` before it calls the block. So the received tensor has to be there
when the caller's ``x`` comes to be: as what the block before returned, or as what one of the caller's operations after it
did. Which one it is is learnt by a pass in which no block runs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

RETURNED = -1
"""The caller hands a block what the one before it returned."""


class _Became(torch.autograd.Function):
    """Lets a tensor be another one, for all who refer to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        tensor.data = other.data
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def become(tensor: Tensor, other: Tensor) -> bool:
    """Let ``tensor``, which was made by an operation in place, be ``other``; False if it cannot be."""
    if tensor._is_view() or (tensor.is_leaf and tensor.requires_grad) or tensor.dtype != other.dtype:
        return False
    if not torch.is_grad_enabled():
        tensor.data = other.data
    else:
        tensor.detach_()
        _Became.apply(tensor, other)
    return True


class Between(TorchFunctionMode):
    """Around a step: numbers the operations from one block's return to the next one's call.

    Args:
        at: the number of the operation whose result is to be another tensor; None to learn it.

    Attributes:
        placed: the tensor that is the other one now, and its version.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self._instead = at, None
        self.placed: tuple[Tensor, int] | None = None
        self._returned: Tensor | None = None
        self._results: list[Any] | None = None
        self._count = 0

    def after(self, returned: Tensor, instead: Tensor | None = None) -> None:
        """A block returned; ``instead`` is what the operation's result is to be, if this is where it stands."""
        self._returned, self._instead, self._results, self._count = returned, instead, [], 0

    def before(self, hidden: Tensor) -> int | None:
        """A block is called: by which operation ``hidden`` came to be, or :data:`RETURNED`; None if that is not known."""
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
