"""Triton kernels for group quantisation, each with one read and one write.

A group of ``GROUP`` elements has eight octants of ``C = GROUP / 8`` elements, in tiles of shape
(values per byte, octants of a value, groups, C). Threads divide the groups and the last dimension, which is contiguous in
memory. The first two dimensions stay in a thread's registers, so packing moves nothing between threads.

Random numbers are Philox-4x32-7 (Salmon et al. 2011). One call with the key ``seed`` and the counter ``group * C + c`` gives
128 bits, 16 for each octant's element. They repeat after 2^35 elements. By the number of instructions, 32 bits per element in
ten rounds would cost more than the memory traffic. ``u = (r + 1/2) / 2^16`` is uniform within 2^-17 of a step.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

BLOCK = 4096  # elements of a tile: 32 for each thread of 4 warps
NUM_WARPS = 4


def num_warps(group_size: int) -> int:
    """Return the warps of a program; groups larger than ``BLOCK`` need more, or registers would spill."""
    return NUM_WARPS * max(group_size // BLOCK, 1)


@triton.jit
def tile_index(group, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Return each element's index, shape (V, 8/V, G, C), for the groups ``group`` of shape (G,)."""
    V: tl.constexpr = 8 // BITS
    C: tl.constexpr = GROUP // 8
    octant = tl.arange(0, V)[:, None, None, None] * BITS + tl.arange(0, BITS)[None, :, None, None]
    return group[None, None, :, None] * GROUP + octant * C + tl.arange(0, C)[None, None, None, :]


@triton.jit
def byte_index(group, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Return each byte's index, shape (8/V, G, C)."""
    C: tl.constexpr = GROUP // 8
    at = tl.arange(0, BITS)[:, None, None] * C + tl.arange(0, C)[None, None, :]
    return group[None, :, None] * (C * BITS) + at


@triton.jit
def lower_index(group, GROUP: tl.constexpr):
    """Return the index of each byte for the lower two of 3 bits, shape (2, G, C)."""
    C: tl.constexpr = GROUP // 8
    return group[None, :, None] * (C * 3) + tl.arange(0, 2)[:, None, None] * C + tl.arange(0, C)[None, None, :]


@triton.jit
def upper_index(group, GROUP: tl.constexpr):
    """Return the index of each byte for the upper one of 3 bits, shape (G, C)."""
    C: tl.constexpr = GROUP // 8
    return group[:, None] * (C * 3) + 2 * C + tl.arange(0, C)[None, :]


@triton.jit
def uniform(seed, group, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Return ``u`` for each element, shape (V, 8/V, G, C), a function of the seed and the element's index."""
    V: tl.constexpr = 8 // BITS
    C: tl.constexpr = GROUP // 8
    counter = (group[:, None] * C + tl.arange(0, C)[None, :]).to(tl.uint32)
    r0, r1, r2, r3 = tl.randint4x(seed, counter, n_rounds=7)
    octant = tl.arange(0, V)[:, None, None, None] * BITS + tl.arange(0, BITS)[None, :, None, None]
    word = octant // 2
    r01 = tl.where(word == 0, r0[None, None, :, :], r1[None, None, :, :])
    r23 = tl.where(word == 2, r2[None, None, :, :], r3[None, None, :, :])
    r = tl.where(word < 2, r01, r23).to(tl.uint32, bitcast=True)
    half = tl.where(octant % 2 == 0, r & 0xFFFF, r >> 16)
    return (half.to(tl.float32) + 0.5) * (1.0 / 65536.0)


@triton.jit
def encode(value, inside, seed, group, GROUP: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return bytes (8/V, G, C), scale (G,) and minimum (G,) of float32 values of shape (V, 8/V, G, C)."""
    V: tl.constexpr = 8 // BITS
    code, scale, low = code_of(value, inside, seed, group, GROUP, BITS, 2**BITS - 1, STOCHASTIC)
    byte = tl.sum(code << (tl.arange(0, V) * BITS)[:, None, None, None], axis=0)
    return byte.to(tl.uint8), scale, low


@triton.jit
def encode_three(value, inside, seed, group, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Encode 3 bits of values (4, 2, G, C) like :func:`encode`: bytes (2, G, C) of the lower two bits, (G, C) of the upper."""
    code, scale, low = code_of(value, inside, seed, group, GROUP, 2, 7, STOCHASTIC)
    lower = tl.sum((code & 3) << (tl.arange(0, 4) * 2)[:, None, None, None], axis=0)
    octant = tl.arange(0, 4)[:, None, None, None] * 2 + tl.arange(0, 2)[None, :, None, None]
    upper = tl.sum(tl.sum((code >> 2) << octant, axis=0), axis=0)
    return lower.to(tl.uint8), upper.to(tl.uint8), scale, low


@triton.jit
def code_of(
    value, inside, seed, group, GROUP: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Return codes up to LEVELS, int32, scale (G,) and minimum (G,) of float32 values in the layout of BITS."""
    finite = tl.abs(value) <= 3.4028234663852886e38
    value = tl.where(finite, value, 0.0)
    low = tl.where(inside, value, float("inf"))
    low = tl.min(tl.min(tl.min(low, axis=0), axis=0), axis=1)
    high = tl.where(inside, value, float("-inf"))
    high = tl.max(tl.max(tl.max(high, axis=0), axis=0), axis=1)
    good = (finite | (inside == 0)).to(tl.int32)
    good = tl.min(tl.min(tl.min(good, axis=0), axis=0), axis=1)
    # scale = (max - min) / (2^b - 1)
    span = high - low
    inverse = LEVELS / tl.maximum(span, 1e-36)
    # code = clamp(floor((x - min) / scale + u), 0, 2^b - 1)
    scaled = tl.where(inside, value - low[None, None, :, None], 0.0) * inverse[None, None, :, None]
    if STOCHASTIC:
        scaled += uniform(seed, group, GROUP, BITS)
    else:
        scaled += 0.5
    code = tl.minimum(tl.maximum(scaled, 0.0), LEVELS).to(tl.int32)
    code = tl.where(inside, code, 0)
    scale = tl.where(good == 1, span / LEVELS, float("nan"))
    return code, scale, tl.where(good == 1, low, float("nan"))


@triton.jit
def decode(byte, scale, low, BITS: tl.constexpr):
    """Return float32 values (V, 8/V, G, C) of bytes (8/V, G, C), scale (G,) and minimum (G,)."""
    V: tl.constexpr = 8 // BITS
    shift = (tl.arange(0, V) * BITS)[:, None, None, None]
    code = (byte.to(tl.int32)[None, :, :, :] >> shift) & (2**BITS - 1)
    # decoded = min + scale code
    return low[None, None, :, None] + scale[None, None, :, None] * code.to(tl.float32)


@triton.jit(do_not_specialize=["seed"])
def quantize_kernel(
    x,
    codes,
    scale,
    minimum,
    num,
    seed,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Quantise ``x`` (num,) of any float type into ``codes``, ``scale`` and ``minimum``, BLOCK_GROUPS groups per program."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    index = tile_index(group, GROUP, 2 if BITS == 3 else BITS)
    inside = index < num
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    there = group * GROUP < num
    if BITS == 3:
        byte, upper, step, low = encode_three(value, inside, seed, group, GROUP, STOCHASTIC)
        tl.store(codes + lower_index(group, GROUP), byte, mask=there[None, :, None])
        tl.store(codes + upper_index(group, GROUP), upper, mask=there[:, None])
    else:
        byte, step, low = encode(value, inside, seed, group, GROUP, BITS, STOCHASTIC)
        tl.store(codes + byte_index(group, GROUP, BITS), byte, mask=there[None, :, None])
    tl.store(scale + group, step, mask=there)
    tl.store(minimum + group, low, mask=there)


@triton.jit
def dequantize_kernel(
    codes, scale, minimum, out, num, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_GROUPS: tl.constexpr
):
    """The inverse of ``quantize_kernel``, into ``out`` (num,) of any float type."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    there = group * GROUP < num
    step = tl.load(scale + group, mask=there, other=0.0)
    low = tl.load(minimum + group, mask=there, other=0.0)
    index = tile_index(group, GROUP, 2 if BITS == 3 else BITS)
    if BITS == 3:
        byte = tl.load(codes + lower_index(group, GROUP), mask=there[None, :, None], other=0)
        upper = tl.load(codes + upper_index(group, GROUP), mask=there[:, None], other=0).to(tl.int32)
        octant = tl.arange(0, 4)[:, None, None, None] * 2 + tl.arange(0, 2)[None, :, None, None]
        code = (byte.to(tl.int32)[None, :, :, :] >> (tl.arange(0, 4) * 2)[:, None, None, None]) & 3
        code = code | (((upper[None, None, :, :] >> octant) & 1) << 2)
        value = low[None, None, :, None] + step[None, None, :, None] * code.to(tl.float32)
    else:
        byte = tl.load(codes + byte_index(group, GROUP, BITS), mask=there[None, :, None], other=0)
        value = decode(byte, step, low, BITS)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < num)


def buffers(num: int, bits: int, group_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the codes, scales and minima of ``num`` elements."""
    num_groups = -(-num // group_size)
    codes = torch.empty(num_groups * group_size * bits // 8, dtype=torch.uint8, device=device)
    scale, minimum = (torch.empty(num_groups, dtype=torch.float32, device=device) for _ in range(2))
    return codes, scale, minimum


def over_groups(
    kernel: Any, tensors: tuple[Tensor, ...], num: int, *scalars: int, group_size: int, block: int, **constants: Any
) -> None:
    """Launch ``kernel(*tensors, num, *scalars)`` over the groups of ``num`` elements.

    Args:
        kernel: works on BLOCK_GROUPS groups of GROUP elements per program.
        tensors: its pointers.
        num: number of elements; with 0 nothing is launched.
        scalars: arguments after ``num``.
        group_size: GROUP.
        block: elements per program, at least one group.
        constants: other constants.
    """
    block_groups = max(block // group_size, 1)
    if num:
        with _launch.current(tensors[0].device):
            kernel[(triton.cdiv(num, group_size * block_groups),)](
                *tensors,
                num,
                *scalars,
                GROUP=group_size,
                BLOCK_GROUPS=block_groups,
                num_warps=num_warps(group_size),
                **constants,
            )


def quantize(
    x: Tensor, bits: int, group_size: int, seed: int | None, *, block: int = BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and minima of a contiguous ``x``; a program has ``block`` elements or one group."""
    packed = buffers(x.numel(), bits, group_size, x.device)
    over_groups(
        quantize_kernel,
        (x, *packed),
        x.numel(),
        seed or 0,
        group_size=group_size,
        block=block,
        BITS=bits,
        STOCHASTIC=seed is not None,
    )
    return packed


def dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, out: Tensor, bits: int, group_size: int, *, block: int = BLOCK
) -> None:
    """Decode into a contiguous ``out``."""
    held = codes, scale, minimum
    over_groups(dequantize_kernel, (*held, out), out.numel(), group_size=group_size, block=block, BITS=bits)
