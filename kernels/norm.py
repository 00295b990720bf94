"""LayerNorm and RMSNorm with one backward kernel that reads each row once.

Over the last dimension, of ``D`` elements (Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467):

    n = (x - mean(x)) r,  r = 1 / sqrt(var(x) + eps),   y = w n + b                   LayerNorm

    n = x r,              r = 1 / sqrt(mean(x^2) + eps),  y = w n                     RMSNorm

    dx = r (w g - mean(w g) - n mean(n w g))              without mean(w g) in RMSNorm
    dw = sum g n,   db = sum g                            over all rows

Backward reads ``x`` and ``g`` once and writes ``dx`` once. Each program also adds up its part of ``dw`` and ``db`` in float32.
Forward keeps ``x`` in full and not ``n``, since other operations often keep ``x`` too.

On a CPU this is torch's ``layer_norm`` and ``rms_norm``. So it is on a GPU for float64 and for rows longer than 8192 elements.
The other good implementation is Liger's. In its tables for an H100, LayerNorm reaches 87 % of the memory's bandwidth in
forward and 42 % in backward; torch reaches 52 and 37 %. With short rows (1024 elements) torch is faster, because Liger handles
one row at a time. So these kernels put several short rows in a tile, and keep partial sums element by element.

`benchmarks/README.md` has their speed on an H100, forward near that of a copy. If memory limits the batch,
:mod:`lightning_eff.kernels.compressed_norm` keeps a quarter or less.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_eff.kernels import _launch

MAX_FUSED = 8192  # D that one Triton program holds in registers
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Compute LayerNorm over the last dimension (see the module's docstring).

    Args:
        x: float64, float32, bfloat16 or float16, of shape (..., D).
        weight: ``w`` of shape (D,), of any of these dtypes, or None for 1.
        bias: ``b`` of shape (D,), or None for 0; needs a ``weight``.
        eps: added to the variance.

    Returns:
        ``y`` in the shape and dtype of ``x``, under autocast too, computed in float32 and rounded once. The result of the
        Triton kernel can be differentiated once.

    Raises:
        ValueError: if a shape does not match.
        TypeError: if ``x`` is not floating-point.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    return _norm(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Compute RMSNorm over the last dimension like :func:`layer_norm`."""
    return _norm(x, weight, None, eps, False)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
    who = "layer_norm" if centre else "rms_norm"
    if not x.ndim or not x.numel():
        raise ValueError(f"{who}(x of shape {tuple(x.shape)}): expected (..., D) with at least one element.")
    if not x.is_floating_point():
        raise TypeError(f"{who}(x of {x.dtype}): expected a floating-point dtype.")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{who}({name} of shape {tuple(tensor.shape)}): expected ({x.shape[-1]},), as x's last.")
    if bias is not None and weight is None:
        raise ValueError(f"{who}(weight=None, bias=...): a bias needs a weight. Pass weight=torch.ones({x.shape[-1]}).")
    if _launch.uses_triton(x) and x.dtype in FUSED_DTYPES and x.shape[-1] <= MAX_FUSED:
        return _Norm.apply(x, weight, bias, eps, centre)
    wide = x.dtype
    for tensor in (weight, bias):
        wide = wide if tensor is None else torch.promote_types(wide, tensor.dtype)
    full, w, b = (None if t is None else t.to(wide) for t in (x, weight, bias))
    assert full is not None
    y = F.layer_norm(full, x.shape[-1:], w, b, eps) if centre else F.rms_norm(full, x.shape[-1:], w, eps)
    return y.to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
        x = x.contiguous()
        y, mean, r = _launch.triton_module("norm").forward(x, weight, bias, eps, centre)
        # as integers of the same bytes, so that techniques that compress saved floats skip them
        ctx.save_for_backward(x, None if mean is None else mean.view(torch.int32), r.view(torch.int32), weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- what `once_differentiable` makes of it
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, mean, r, weight, bias = ctx.saved_tensors
        mean = None if mean is None else mean.view(torch.float32)
        kernels = _launch.triton_module("norm")
        dx, dw, db = kernels.backward(grad_outputs[0], x, mean, r.view(torch.float32), weight, bias)
        return dx, dw, db, None, None
