"""Count the correct answers of a training step as its loss is computed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core.losses import bind_loss


class CountRight(TorchFunctionMode):
    """Counts the correct answers and all answers in the classification losses that run under it.

    The answer is the class with the largest score, the sign of a binary score, or whether a probability exceeds one half.
    Ignored targets do not count. Class probabilities as targets stand for their most likely class.

    Attributes:
        right: the number of correct answers, a scalar tensor, or None if no loss was seen.
        total: the number of answers.
    """

    apart_from_compiled = True  # sees nothing in compiled code, so nothing is compiled with it

    def __init__(self) -> None:
        super().__init__()
        self.right: Tensor | None = None
        self.total: Tensor | None = None

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        arguments = bind_loss(func, args, kwargs)
        found = None if arguments is None else answers(func, arguments)
        if found is not None:
            right, total = found
            self.right = right if self.right is None else self.right + right
            self.total = total if self.total is None else self.total + total
        return output


@torch.no_grad()
def answers(func: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Count the correct answers and all answers of one loss call, as scalars, or None if it is not on classes."""
    z, target = arguments["input"].detach(), arguments["target"].detach()
    if func in (F.cross_entropy, F.nll_loss):
        axis = 0 if z.ndim == 1 else 1
        answer = z.argmax(dim=axis)
        if target.is_floating_point():
            target, counts = target.argmax(dim=axis), torch.ones_like(answer, dtype=torch.bool)
        else:
            counts = target != arguments["ignore_index"]
        right = (answer == target) & counts
    elif func in (F.binary_cross_entropy_with_logits, F.binary_cross_entropy):
        threshold = 0.0 if func is F.binary_cross_entropy_with_logits else 0.5
        right = (z > threshold) == (target > 0.5)
        counts = torch.ones_like(right)
    else:
        return None
    return right.sum(), counts.sum()
