"""GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) that keeps its derivative in a few bits instead of its input.

Forward is exact, in both forms of the paper:

    y = x Phi(x) = x/2 (1 + erf(x / sqrt 2))                                          "none"
    y = x/2 (1 + tanh z),  z = sqrt(2/pi) (x + 0.044715 x^3)                          "tanh"

Backward needs only ``dx = g y'(x)``, so forward keeps ``y'``, quantised by group in the same pass:

    y' = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)                                        "none"

    y' = (1 + tanh z)/2 + x/2 (1 - tanh^2 z) sqrt(2/pi) (1 + 3 * 0.044715 x^2)        "tanh"

It keeps the derivative and not the input for two reasons. ``dx`` is linear in ``y'``, so the gradient is unbiased with
stochastic rounding, while ``y'`` of a rounded ``x`` is biased. And ``y'`` is always in [-0.13, 1.13], so outliers in ``x``
cost nothing.

The best existing implementations, by torch and Liger, keep ``x`` in full. They need 4 or 2 bytes per element, and this one
``bits / 8 + 8 / group_size``. They are faster, since they do not compute and pack ``y'``. Use this one if memory limits the
batch. A GELU in separate operations, such as transformers' ``gelu_new``, keeps several times as much and is slower than
either.
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
    """Compute the GELU of ``x``, and keep a compressed derivative for backward (see the module's docstring).

    Args:
        x: float32, bfloat16 or float16, of any shape; float64 too if ``bits`` is None.
        approximate: "none" or "tanh", as in ``torch.nn.functional.gelu``.
        bits: bits per kept element, 1, 2, 4 or 8; None keeps the derivative in the dtype of ``x``.
        group_size: elements that share a range, a power of two from 16 to 8192.
        seed: seed of stochastic rounding, different for each call; None rounds to nearest.

    Returns:
        The GELU in the shape and dtype of ``x``. It can be differentiated once.

    Raises:
        ValueError: if an argument is out of range.
        TypeError: if ``x`` has another dtype.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    if approximate not in FORMS:
        raise ValueError(f"compressed_gelu({approximate=}): expected one of {FORMS}.")
    if bits is not None:
        check(x, bits, group_size, seed, choices=FUSED_BITS)
    return _CompressedGELU.apply(x, approximate, bits, group_size, seed)


def reference_gelu(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Return ``y`` and ``y'`` in float64, as in the module's docstring."""
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
