"""Activation functions under their equations, element by element, and gates."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def isrlu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """``x`` if x >= 0, else ``x / sqrt(1 + alpha x^2)``, which tends to -1/sqrt(alpha) (Carlile et al. 2017)."""
    return torch.where(x >= 0, x, x * torch.rsqrt(1.0 + alpha * x * x))


def relu2(x: Tensor) -> Tensor:
    """``max(x, 0)^2`` (So et al. 2021)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """``x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, within 4.8e-4 of GELU (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """``SiLU(a) b`` for the halves a and b of the last dimension of ``x``, (..., 2 w) to (..., w) (Shazeer 2020)."""
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


#: By name. The marks in checkpoints depend on this order.
ELEMENTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "elu": F.elu,
    "selu": F.selu,
    "isrlu": isrlu,
}
GATED: Mapping[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu}
NAMES = (*ELEMENTWISE, *GATED)


def gated_width(width: int, multiple: int) -> int:
    """The multiple nearest to two thirds of ``width``: three layers of that width have as many weights as two of ``width``.

    ``3 d w = 2 d width``, so ``w = 2/3 width``.
    """
    return max(1, round(2 * width / (3 * multiple))) * multiple
