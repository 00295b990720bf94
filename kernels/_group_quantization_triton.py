"""Triton kernels for group quantisation, each with one read and one write.

A group of ``GROUP`` elements has eight octants of ``C = GROUP / 8`` elements. A program quantises ``GROUPS`` groups, as a
tuple of eight tensors (GROUPS, C), one for each octant. Values that share a byte are in different octants, so packing moves
nothing between threads, whatever layout the compiler chooses. Programs that only decode hold the ``V = 8 / BITS`` values of
each byte as a tuple of tensors (GROUPS, C BITS).

All tiles but the last one are whole, and need no mask. A second launch works on the last one.

Random numbers are Philox-4x32-7 (Salmon et al. 2011). One call with the key ``seed`` and the counter ``group * C + c`` gives
128 bits, 16 for each octant's element. They repeat after 2^35 elements. By the number of instructions, 32 bits per element in
ten rounds would cost more than the memory traffic. ``u = 1/2 + (r - 32767.5) (1 - 2^-12) / 2^16`` is unbiased, and uniform
within 2^-12 of a step. It stays far enough from 0 and 1 that no code is out of range, so no code is clamped.

Codes come from adding 1.5 * 2^23, which rounds to an integer and leaves it in the lowest bits of the float. This takes a
fraction of the time of a conversion. Codes of a byte are added as floats, which is exact.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

BLOCK = 4096  # elements of a tile: 32 for each thread of 4 warps
NUM_WARPS = 4
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23
NOISE = tl.constexpr((1 - 2**-12) / 65536)


def num_warps(group_size: int) -> int:
    """Return the warps of a program; groups larger than ``BLOCK`` need more, or registers would spill."""
    return NUM_WARPS * max(group_size // BLOCK, 1)


@triton.jit
def rows_of(GROUPS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets (GROUPS, WIDTH), int32, of the first WIDTH elements in groups of STRIDE."""
    return tl.arange(0, GROUPS)[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_parts(x, left, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Return PARTS tensors (GROUPS, GROUP / PARTS), float32, of the groups at ``x``: 0 from ``left`` on, unless EVEN."""
    WIDTH: tl.constexpr = GROUP // PARTS
    index = rows_of(GROUPS, GROUP, WIDTH)
    values = ()
    for j in tl.static_range(PARTS):
        if EVEN:
            value = tl.load(x + index + j * WIDTH)
        else:
            value = tl.load(x + index + j * WIDTH, mask=index + j * WIDTH < left, other=0.0)
        values = values + (value.to(tl.float32),)  # noqa: RUF005 -- Triton has no starred expressions
    return values


@triton.jit
def store_parts(x, left, values, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Store what :func:`load_parts` loads, in the type of ``x``."""
    WIDTH: tl.constexpr = GROUP // PARTS
    index = rows_of(GROUPS, GROUP, WIDTH)
    for j in tl.static_range(PARTS):
        value = values[j].to(x.dtype.element_ty)
        if EVEN:
            tl.store(x + index + j * WIDTH, value)
        else:
            tl.store(x + index + j * WIDTH, value, mask=index + j * WIDTH < left)


@triton.jit
def lesser(a, b):
    """Return the lesser of two numbers, or NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greater(a, b):
    """Return the greater of two numbers, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def range_of(values, left, GROUPS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Return the minimum and the maximum (GROUPS,) of eight octants."""
    C: tl.constexpr = GROUP // 8
    index = rows_of(GROUPS, GROUP, C)
    low = tl.full((GROUPS, C), float("inf"), tl.float32)
    high = tl.full((GROUPS, C), float("-inf"), tl.float32)
    for j in tl.static_range(8):
        if EVEN:
            low, high = lesser(low, values[j]), greater(high, values[j])
        else:
            inside = index + j * C < left
            low = lesser(low, tl.where(inside, values[j], float("inf")))
            high = greater(high, tl.where(inside, values[j], float("-inf")))
    return tl.reduce(low, 1, lesser), tl.reduce(high, 1, greater)


@triton.jit
def centred(word, UPPER: tl.constexpr):
    """Return ``u`` - 1/2 for the upper or lower 16 bits of ``word``."""
    half = (word >> 16) if UPPER else (word & 0xFFFF)
    # the bits of 2^23 + r
    number = (half | 0x4B000000).to(tl.float32, bitcast=True) - 8421376.0
    return number * NOISE + NOISE * 0.5


@triton.jit
def rounded(
    values,
    left,
    seed,
    first,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LEVELS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return codes plus MAGIC, eight float32 tensors, and scale and minimum (GROUPS,). ``first`` is the tile's first group."""
    C: tl.constexpr = GROUP // 8
    low, high = range_of(values, left, GROUPS, GROUP, EVEN)
    # scale = (max - min) / (2^b - 1); NaN and infinity make it not finite
    span = high - low
    inverse = (LEVELS / tl.maximum(span, 1e-36))[:, None]
    index = rows_of(GROUPS, GROUP, C)
    if STOCHASTIC:
        counter = (first * C).to(tl.uint32) + rows_of(GROUPS, C, C).to(tl.uint32)
        words = tl.randint4x(seed, counter, n_rounds=7)
    codes = ()
    for j in tl.static_range(8):
        # code = floor((x - min) / scale + u), the nearest integer to (x - min) / scale + u - 1/2
        difference = values[j] - low[:, None]
        if not EVEN:
            difference = tl.where(index + j * C < left, difference, 0.0)
        code = difference * inverse
        if STOCHASTIC:
            code += centred(words[j // 2].to(tl.uint32, bitcast=True), j % 2 == 1)
        codes = codes + (code + MAGIC,)  # noqa: RUF005
    return codes, span / LEVELS, low


@triton.jit
def byte_of(codes, B: tl.constexpr, BITS: tl.constexpr):
    """Return the byte, uint8, of octants B, B + BITS, B + 2 BITS and so on."""
    total = codes[B]
    for v in tl.static_range(1, 8 // BITS):
        total += (codes[B + v * BITS] - MAGIC) * (1 << (v * BITS))
    return total.to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def store_plane(
    codes,
    byte,
    left,
    AT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store ``byte`` (GROUPS, C) from byte AT of each group's BYTES."""
    index = rows_of(GROUPS, BYTES, GROUP // 8) + AT
    if EVEN:
        tl.store(codes + index, byte)
    else:
        tl.store(codes + index, byte, mask=(tl.arange(0, GROUPS) * GROUP < left)[:, None])


@triton.jit
def store_groups(pointer, value, left, GROUPS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Store a number for each group."""
    group = tl.arange(0, GROUPS)
    if EVEN:
        tl.store(pointer + group, value)
    else:
        tl.store(pointer + group, value, mask=group * GROUP < left)


@triton.jit
def load_groups(pointer, left, GROUPS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Load a number for each group."""
    group = tl.arange(0, GROUPS)
    return tl.load(pointer + group) if EVEN else tl.load(pointer + group, mask=group * GROUP < left, other=0.0)


@triton.jit
def encode(
    values,
    codes,
    scale,
    minimum,
    left,
    seed,
    first,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Quantise and store eight octants of float32. ``first`` is the tile's first group, to which the pointers lead."""
    C: tl.constexpr = GROUP // 8
    rounds, step, low = rounded(values, left, seed, first, GROUPS, GROUP, 2**BITS - 1, STOCHASTIC, EVEN)
    if BITS == 3:
        three = ()
        upper = tl.full((GROUPS, C), 0, tl.int32)
        for j in tl.static_range(8):
            code = rounds[j].to(tl.int32, bitcast=True) & 7
            upper |= (code >> 2) << j
            three = three + ((code & 3).to(tl.float32) + MAGIC,)  # noqa: RUF005
        for b in tl.static_range(2):
            store_plane(codes, byte_of(three, b, 2), left, b * C, 3 * C, GROUPS, GROUP, EVEN)
        store_plane(codes, upper.to(tl.uint8), left, 2 * C, 3 * C, GROUPS, GROUP, EVEN)
    else:
        for b in tl.static_range(BITS):
            store_plane(codes, byte_of(rounds, b, BITS), left, b * C, BITS * C, GROUPS, GROUP, EVEN)
    store_groups(scale, step, left, GROUPS, GROUP, EVEN)
    store_groups(minimum, low, left, GROUPS, GROUP, EVEN)


@triton.jit
def decode(
    codes, scale, minimum, left, GROUPS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr
):
    """Return the V = 8 / BITS parts of each group, float32 of shape (GROUPS, GROUP / V), or eight octants of 3 bits."""
    step = load_groups(scale, left, GROUPS, GROUP, EVEN)[:, None]
    low = load_groups(minimum, left, GROUPS, GROUP, EVEN)[:, None]
    there = (tl.arange(0, GROUPS) * GROUP < left)[:, None]
    # decoded = min + scale code
    values = ()
    if BITS == 3:
        C: tl.constexpr = GROUP // 8
        index = rows_of(GROUPS, 3 * C, C)
        upper = tl.load(codes + index + 2 * C, mask=there, other=0).to(tl.int32)
        for j in tl.static_range(8):
            byte = tl.load(codes + index + (j % 2) * C, mask=there, other=0).to(tl.int32)
            code = ((byte >> (j // 2 * 2)) & 3) | (((upper >> j) & 1) << 2)
            values = values + (low + step * code.to(tl.float32),)  # noqa: RUF005
    else:
        BYTES: tl.constexpr = GROUP * BITS // 8
        index = rows_of(GROUPS, BYTES, BYTES)
        byte = (tl.load(codes + index) if EVEN else tl.load(codes + index, mask=there, other=0)).to(tl.int32)
        for v in tl.static_range(8 // BITS):
            code = (byte >> (v * BITS)) & (2**BITS - 1)
            values = values + (low + step * code.to(tl.float32),)  # noqa: RUF005
    return values


@triton.jit(do_not_specialize=["num", "first", "seed"])
def quantize_kernel(
    x,
    codes,
    scale,
    minimum,
    num,
    first,
    seed,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Quantise ``x`` (num,) of any float type into ``codes``, ``scale`` and ``minimum``, GROUPS groups per program."""
    group = (tl.program_id(0) + first).to(tl.int64) * GROUPS
    left = (num - group * GROUP).to(tl.int32) if not EVEN else GROUPS * GROUP
    values = load_parts(x + group * GROUP, left, 8, GROUPS, GROUP, EVEN)
    codes += group * (GROUP * BITS // 8)
    encode(values, codes, scale + group, minimum + group, left, seed, group, GROUPS, GROUP, BITS, STOCHASTIC, EVEN)


@triton.jit(do_not_specialize=["num", "first"])
def dequantize_kernel(
    codes,
    scale,
    minimum,
    out,
    num,
    first,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The inverse of ``quantize_kernel``, into ``out`` (num,) of any float type."""
    group = (tl.program_id(0) + first).to(tl.int64) * GROUPS
    left = (num - group * GROUP).to(tl.int32) if not EVEN else GROUPS * GROUP
    codes += group * (GROUP * BITS // 8)
    values = decode(codes, scale + group, minimum + group, left, GROUPS, GROUP, BITS, EVEN)
    store_parts(out + group * GROUP, left, values, 8 if BITS == 3 else 8 // BITS, GROUPS, GROUP, EVEN)


def buffers(num: int, bits: int, group_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the codes, scales and minima of ``num`` elements."""
    num_groups = -(-num // group_size)
    codes = torch.empty(num_groups * group_size * bits // 8, dtype=torch.uint8, device=device)
    scale, minimum = (torch.empty(num_groups, dtype=torch.float32, device=device) for _ in range(2))
    return codes, scale, minimum


def over_groups(
    kernel: Any, tensors: tuple[Tensor, ...], num: int, *scalars: int, group_size: int, block: int, **constants: Any
) -> None:
    """Launch ``kernel(*tensors, num, first, *scalars)`` over the groups of ``num`` elements, whole tiles first.

    Args:
        kernel: works on GROUPS groups of GROUP elements per program, from program ``first`` on, with masks unless EVEN.
        tensors: its pointers.
        num: number of elements; with 0 nothing is launched.
        scalars: arguments after ``first``.
        group_size: GROUP.
        block: elements per program, at least one group.
        constants: other constants.
    """
    groups = max(block // group_size, 1)
    whole, rest = divmod(num, groups * group_size)
    with _launch.current(tensors[0].device):
        for first, programs, even in ((0, whole, True), (whole, int(rest > 0), False)):
            if programs:
                kernel[(programs,)](
                    *tensors,
                    num,
                    first,
                    *scalars,
                    GROUP=group_size,
                    GROUPS=groups,
                    EVEN=even,
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
