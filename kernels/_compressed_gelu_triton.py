"""GELU with a compressed derivative as Triton kernels: forward reads ``x`` once, backward reads ``g`` and the bytes."""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels._group_quantization_triton import (
    BLOCK,
    buffers,
    byte_index,
    decode,
    encode,
    over_groups,
    tile_index,
)
from lightning_eff.kernels.group_quantization import Packed


@triton.jit(do_not_specialize=["seed"])
def forward_kernel(
    x,
    y,
    codes,
    scale,
    minimum,
    num,
    seed,
    TANH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Compute ``y = gelu(x)``, both (num,), and the codes, scales and minima of its derivative."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    index = tile_index(group, GROUP, BITS)
    inside = index < num
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        # y' = (1 + t)/2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2),  t = tanh z = 2 sigmoid(2 z) - 1
        square = value * value
        t = 2.0 * tl.sigmoid(1.5957691216057308 * value * (1.0 + 0.044715 * square)) - 1.0
        portion = 0.5 * (1.0 + t)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * square)
        derivative = portion + 0.5 * value * (1.0 - t * t) * slope
    else:
        # y' = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
        portion = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
        derivative = portion + value * tl.exp(-0.5 * value * value) * 0.3989422804014327
    tl.store(y + index, (value * portion).to(y.dtype.element_ty), mask=inside)
    byte, step, low = encode(derivative, inside, seed, group, GROUP, BITS, STOCHASTIC)
    there = group * GROUP < num
    tl.store(codes + byte_index(group, GROUP, BITS), byte, mask=there[None, :, None])
    tl.store(scale + group, step, mask=there)
    tl.store(minimum + group, low, mask=there)


@triton.jit
def backward_kernel(
    g, codes, scale, minimum, dx, num, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_GROUPS: tl.constexpr
):
    """Compute ``dx = g y'``, all (num,)."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    there = group * GROUP < num
    byte = tl.load(codes + byte_index(group, GROUP, BITS), mask=there[None, :, None], other=0)
    step = tl.load(scale + group, mask=there, other=0.0)
    low = tl.load(minimum + group, mask=there, other=0.0)
    index = tile_index(group, GROUP, BITS)
    inside = index < num
    value = tl.load(g + index, mask=inside, other=0.0).to(tl.float32) * decode(byte, step, low, BITS)
    tl.store(dx + index, value.to(dx.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, approximate: str, bits: int, group_size: int, seed: int | None, *, block: int = BLOCK
) -> tuple[Tensor, Packed]:
    """Return ``gelu(x)`` and its compressed derivative."""
    x = x.contiguous()
    y, packed = torch.empty_like(x), buffers(x.numel(), bits, group_size, x.device)
    over_groups(
        forward_kernel,
        (x, y, *packed),
        x.numel(),
        seed or 0,
        group_size=group_size,
        block=block,
        TANH=approximate == "tanh",
        BITS=bits,
        STOCHASTIC=seed is not None,
    )
    return y, Packed(*packed, x.shape, x.dtype, bits, group_size)


def backward(g: Tensor, packed: Packed, *, block: int = BLOCK) -> Tensor:
    """Return ``dx`` with the shape of ``g`` and the dtype of ``x``."""
    dx = torch.empty(packed.shape, dtype=packed.dtype, device=g.device)
    held = packed.codes, packed.scale, packed.minimum
    over_groups(
        backward_kernel,
        (g.contiguous(), *held, dx),
        dx.numel(),
        group_size=packed.group_size,
        block=block,
        BITS=packed.bits,
    )
    return dx
