"""LayerNorm and RMSNorm that keep their normalised output in a few bits instead of their input.

Over the last dimension, of ``D`` elements (Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467):

    n = (x - mean(x)) r,  r = 1 / sqrt(var(x) + eps),   y = w n + b                   LayerNorm

    n = x r,              r = 1 / sqrt(mean(x^2) + eps),  y = w n                     RMSNorm

Forward is exact. Backward needs ``n``, quantised by group in the same pass, and one float32 ``r`` per row:

    dx = r (w g - mean(w g) - n mean(n w g))                                          LayerNorm

    dx = r (w g - n mean(n w g))                                                      RMSNorm

    dw = sum g n,   db = sum g                                          over all rows

It keeps the normalised output and not the input, because both gradients depend on ``n``. ``n`` has mean square 1 in every
row, so its error is a fraction of a step of that range. With a rounded ``x``, ``x - mean(x)`` loses digits if the mean is
much larger than the standard deviation. With stochastic rounding ``dw`` is unbiased. The bias of ``dx`` is the variance of
the rounding divided by ``D``.

The best existing implementations, by torch and Liger, keep ``x`` in full. They need 4 or 2 bytes per element, and this one
``bits / 8 + 8 / group_size``. They are faster, since they do not pack. Use this one if memory limits the batch and no other
operation's backward keeps ``x``. A residual addition does not keep it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_eff.kernels import _launch
from lightning_eff.kernels._kept import keep, kept
from lightning_eff.kernels.group_quantization import FUSED_BITS, Packed, check, dequantize, quantize

MAX_FUSED = 16_384  # D that one Triton program holds in registers


def compressed_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    bits: int | None = 8,
    group_size: int = 256,
    seed: int | None = None,
) -> Tensor:
    """Compute LayerNorm over the last dimension, and keep a compressed ``n`` (see the module's docstring).

    On CUDA one kernel normalises and packs if ``group_size`` divides ``D`` and ``D`` is at most 16384. Otherwise there are two
    kernels.

    Args:
        x: float32, bfloat16 or float16, of shape (..., D); float64 too if ``bits`` is None.
        weight: ``w`` of shape (D,), or None for 1.
        bias: ``b`` of shape (D,), or None for 0; needs a ``weight``.
        eps: added to the variance.
        bits: bits per kept element, 1, 2, 4 or 8; None keeps ``n`` in the dtype of ``x``.
        group_size: elements that share a range, a power of two from 16 to 8192.
        seed: seed of stochastic rounding, different for each call; None rounds to nearest.

    Returns:
        ``y`` in the shape and dtype of ``x``. It can be differentiated once.

    Raises:
        ValueError: if an argument is out of range, or a shape does not match.
        TypeError: if ``x`` has another dtype.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    return _norm(x, weight, bias, eps, True, bits, group_size, seed)


def compressed_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-5,
    bits: int | None = 8,
    group_size: int = 256,
    seed: int | None = None,
) -> Tensor:
    """Compute RMSNorm over the last dimension like :func:`compressed_layer_norm`."""
    return _norm(x, weight, None, eps, False, bits, group_size, seed)


def reference_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y``, ``n`` and ``r`` (..., 1) in float64, of LayerNorm if ``centre``, else of RMSNorm."""
    x = x.double()
    deviation = x - x.mean(-1, keepdim=True) if centre else x
    r = 1 / torch.sqrt((deviation**2).mean(-1, keepdim=True) + eps)
    n = deviation * r
    y = n if weight is None else n * weight.double()
    return y if bias is None else y + bias.double(), n, r


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    bits: int | None,
    group_size: int,
    seed: int | None,
) -> Tensor:
    who = "compressed_layer_norm" if centre else "compressed_rms_norm"
    if not x.ndim or not x.numel():
        raise ValueError(f"{who}(x of shape {tuple(x.shape)}): expected (..., D) with at least one element.")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{who}({name} of shape {tuple(tensor.shape)}): expected ({x.shape[-1]},), as x's last.")
    if bias is not None and weight is None:
        raise ValueError(f"{who}(weight=None, bias=...): a bias needs a weight. Pass weight=torch.ones({x.shape[-1]}).")
    if bits is not None:
        check(x, bits, group_size, seed, choices=FUSED_BITS)
    return _CompressedNorm.apply(x, weight, bias, eps, centre, bits, group_size, seed)


class _CompressedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centre: bool,
        bits: int | None,
        group_size: int,
        seed: int | None,
    ) -> Tensor:
        size = x.shape[-1:]
        if bits is not None and _launch.uses_triton(x) and size[0] % group_size == 0 and size[0] <= MAX_FUSED:
            fused = _launch.triton_module("compressed_norm")
            y, packed, r = fused.forward(x, weight, bias, eps, centre, bits, group_size, seed)
        else:
            full = x if x.dtype == torch.float64 else x.float()
            if centre:
                n, _, r = torch.native_layer_norm(full, size, None, None, eps)
                y = n.to(x.dtype) if weight is None else torch.native_layer_norm(x, size, weight, bias, eps)[0]
            else:
                r = torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
                n = full * r
                y = (n if weight is None else n * weight).to(x.dtype)
            packed = n.to(x.dtype) if bits is None else quantize(n, bits, group_size, seed=seed)
        ctx.centre, ctx.of_r = centre, r.dtype
        bytes_of_r = r.view(torch.int64 if r.element_size() == 8 else torch.int32)  # as `keep` does
        keep(ctx, packed, bytes_of_r, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- what `once_differentiable` makes of it
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        packed, r, weight, bias = kept(ctx)
        assert r is not None
        r, size = r.view(ctx.of_r), g.shape[-1:]
        compressed = isinstance(packed, Packed)
        if compressed and _launch.uses_triton(g) and size[0] % packed.group_size == 0 and size[0] <= MAX_FUSED:
            fused = _launch.triton_module("compressed_norm")
            dx, dw, db = fused.backward(g, packed, r, weight, bias, ctx.centre)
            return dx, dw, db, None, None, None, None, None
        n = dequantize(packed) if compressed else packed.to(r.dtype)
        of_g, g = g.dtype, g.to(r.dtype)
        w = None if weight is None else weight.to(r.dtype)
        b = None if bias is None else bias.to(r.dtype)
        if ctx.centre:
            # with n as input, mean 0 and r 1, torch's backward returns dx / r
            zero, one = torch.zeros_like(r), torch.ones_like(r)
            wanted = [True, w is not None, b is not None]
            dx, dw, db = torch.ops.aten.native_layer_norm_backward(g, n, size, zero, one, w, b, wanted)
        else:
            g_n = g * n
            dw, db = None if w is None else g_n.flatten(0, -2).sum(0), None
            along = g_n.mean(-1, keepdim=True) if w is None else (g_n @ w / size[0])[..., None]  # mean(n w g)
            dx = (g if w is None else g * w) - n * along
        dx = dx.mul_(r).to(of_g)
        dw = None if weight is None or dw is None else dw.to(weight.dtype)
        db = None if bias is None or db is None else db.to(bias.dtype)
        return dx, dw, db, None, None, None, None, None
