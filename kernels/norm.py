"""LayerNorm and RMSNorm with one backward kernel that reads each row once; what they save, they save in full.

Over the last dimension, of ``D`` elements (Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467):

    n = (x - mean(x)) r,  r = 1 / sqrt(var(x) + eps),   y = w n + b                   LayerNorm
    n = x r,              r = 1 / sqrt(mean(x^2) + eps),  y = w n                     RMSNorm

    dx = r (w g - mean(w g) - n mean(n w g))              without mean(w g) in RMSNorm
    dw = sum g n,   db = sum g                            over all rows

Backward reads ``x`` and ``g`` and writes ``dx`` once, and sums ``dw`` and ``db`` up in float32 on the way, a share for each
program. ``x`` is kept and not ``n``, since others keep it as well.

The best existing implementations: torch's ``layer_norm`` and ``rms_norm``, which this is on a CPU, and on a GPU for float64
and rows longer than 8192 elements; and Liger's, whose tables for an H100 put LayerNorm at 87 % of the memory's bandwidth in
forward and 42 % in backward, torch at 52 and 37 %, but torch ahead where rows are short (1024 elements), of which Liger
takes one at a time. Hence the two differences from Liger here: several short rows in a tile, and shares that are kept
element by element. Whether this is faster on a GPU has not been measured: until it is, take torch's. Where memory is
what limits the batch, :mod:`lightning_eff.kernels.compressed_norm` keeps a quarter or less.
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
    """LayerNorm over the last dimension (see the module's docstring).

    Args:
        x: float64, float32, bfloat16 or float16, of shape (..., D).
        weight: ``w`` of shape (D,), of any of these dtypes, or None for 1.
        bias: ``b`` of shape (D,), or None for 0; needs a ``weight``.
        eps: added to the variance.

    Returns:
        ``y`` of the shape and dtype of ``x``, under autocast too; computed in float32 and rounded once. Triton's can be
        differentiated once.

    Raises:
        ValueError: a shape that does not match.
        TypeError: ``x`` that is not floating-point.
        ImportError: ``x`` on CUDA and triton not installed.
    """
    return _norm(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """RMSNorm over the last dimension; arguments, result and errors as for :func:`layer_norm`."""
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
        raise ValueError(f"{who}(weight=None, bias=...): expected a weight beside the bias; torch.ones will do.")
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
        # Integers of the same bytes: who compresses the floats that autograd saves leaves them alone
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
