"""GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) that keeps its derivative in a few bits instead of its input.

Forward is exact, in both forms of the paper:

    y = x Phi(x) = x/2 (1 + erf(x / sqrt 2))                                          "none"
    y = x/2 (1 + tanh z),  z = sqrt(2/pi) (x + 0.044715 x^3)                          "tanh"

Backward needs ``dx = g y'(x)`` and nothing else, so what is kept is ``y'``, quantised by group in the same pass:

    y' = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)                                        "none"
    y' = (1 + tanh z)/2 + x/2 (1 - tanh^2 z) sqrt(2/pi) (1 + 3 * 0.044715 x^2)        "tanh"

The derivative and not the input, because ``dx`` is linear in it: with stochastic rounding the gradient is unbiased, where
``y'`` of a rounded ``x`` is not; and because ``y'`` lies in [-0.13, 1.13] whatever ``x`` is, so an outlier costs nothing.

The best existing implementations, torch's and Liger's, keep ``x`` in full: 4 or 2 bytes for each element against
``bits / 8 + 8 / group_size``. They are faster by the passes that compute and pack ``y'``; this one wins where memory is
what limits the batch. A GELU spelled out in separate operations, such as transformers' ``gelu_new``, keeps several times as
much, and is slower than either.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_eff.kernels import _launch
from lightning_eff.kernels._kept import keep, kept
from lightning_eff.kernels.group_quantization import FUSED_BITS, check, dequantize, quantize

FORMS = ("none", "tanh")


def compressed_gelu(
    x: Tensor, *, approximate: str = "none", bits: int | None = 8, group_size: int = 256, seed: int | None = None
) -> Tensor:
    """GELU of ``x``, with a compressed derivative kept for backward (see the module's docstring).

    Args:
        x: float32, bfloat16 or float16, of any shape; also float64 where ``bits`` is None.
        approximate: "none" or "tanh", as in ``torch.nn.functional.gelu``.
        bits: of a kept element: 1, 2, 4 or 8; None keeps the derivative in the dtype of ``x``.
        group_size: elements that share a range, a power of two from 16 to 8192.
        seed: of stochastic rounding, another one for each call; None rounds to nearest.

    Returns:
        As ``torch.nn.functional.gelu``, of the shape and dtype of ``x``. It can be differentiated once.

    Raises:
        ValueError: an argument out of range.
        TypeError: ``x`` of another dtype.
        ImportError: ``x`` on CUDA and triton not installed.
    """
    if approximate not in FORMS:
        raise ValueError(f"compressed_gelu({approximate=}): expected one of {FORMS}.")
    if bits is not None:
        check(x, bits, group_size, seed, choices=FUSED_BITS)
    return _CompressedGELU.apply(x, approximate, bits, group_size, seed)


def reference_gelu(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """``y`` and ``y'`` in float64, as in the module's docstring."""
    x = x.detach().double()
    if approximate == "none":
        phi = (1 + torch.erf(x / math.sqrt(2))) / 2
        return x * phi, phi + x * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t**2) * slope


class _CompressedGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str, bits: int | None, group_size: int, seed: int | None) -> Tensor:
        if bits is not None and _launch.uses_triton(x):
            y, packed = _launch.triton_module("compressed_gelu").forward(x, approximate, bits, group_size, seed)
        else:
            y = torch.nn.functional.gelu(x, approximate=approximate)
            one = torch.ones((), dtype=x.dtype, device=x.device).expand_as(x)
            derivative = torch.ops.aten.gelu_backward(one, x, approximate=approximate)
            packed = derivative if bits is None else quantize(derivative, bits, group_size, seed=seed)
        keep(ctx, packed)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- what `once_differentiable` makes of it
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        (packed,) = kept(ctx)
        if isinstance(packed, Tensor):
            dx = g * packed
        elif _launch.uses_triton(g):
            dx = _launch.triton_module("compressed_gelu").backward(g, packed)
        else:
            dx = dequantize(packed).mul_(g)
        return dx, None, None, None, None
