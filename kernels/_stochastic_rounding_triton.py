"""A Triton kernel for stochastic rounding to bfloat16, with one read and one write.

Random numbers are Philox-4x32-7: one call gives eight elements 16 bits each. The eight are in different octants of a tile of
1024 elements, and a program works on one octant after another, so no bits move between threads. Elements are counted in tiles,
and not in programs, so the numbers depend only on the seed and the index.

All programs but the last one are whole, and need no mask. A second launch works on the last one.
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

TILES = 4  # of 1024 elements for each program: 4 consecutive elements of each octant for each thread
NUM_WARPS = 4


@triton.jit
def octant_index(TILES: tl.constexpr):
    """Return the offsets (TILES, 128), int32, of the first octant's elements in tiles of 1024."""
    return tl.arange(0, TILES)[:, None] * 1024 + tl.arange(0, 128)[None, :]


@triton.jit
def words_of(seed, first, TILES: tl.constexpr):
    """Return four words of random bits (TILES, 128) for tiles from ``first``: 16 bits for each octant's element."""
    counter = (first * 128).to(tl.uint32) + (tl.arange(0, TILES)[:, None] * 128 + tl.arange(0, 128)[None, :]).to(
        tl.uint32
    )
    return tl.randint4x(seed, counter, n_rounds=7)


@triton.jit
def noise_of(words, OCTANT: tl.constexpr):
    """Return a number in [0, 2^16) for each element of an octant, int32."""
    word = words[OCTANT // 2].to(tl.uint32, bitcast=True)
    return ((word >> 16) if OCTANT % 2 == 1 else (word & 0xFFFF)).to(tl.int32)


@triton.jit
def load_octant(x, left, OCTANT: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr):
    """Load an octant (TILES, 128) of the tiles at ``x``; 0 from ``left`` on, unless EVEN."""
    index = octant_index(TILES) + OCTANT * 128
    return tl.load(x + index) if EVEN else tl.load(x + index, mask=index < left, other=0)


@triton.jit
def store_octant(x, value, left, OCTANT: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr):
    """Store what :func:`load_octant` loads."""
    index = octant_index(TILES) + OCTANT * 128
    if EVEN:
        tl.store(x + index, value)
    else:
        tl.store(x + index, value, mask=index < left)


@triton.jit
def round_bits(value, noise):
    """Return the bits of bfloat16, int16, of float32 ``value``; ``noise`` in [0, 2^16) decides whether it rounds up."""
    bits = value.to(tl.int32, bitcast=True)
    finite = tl.abs(value) <= 3.4028234663852886e38
    moved = tl.where(finite, bits + noise, bits)
    moved = tl.where(value == value, moved, 0x7FC00000)
    return (moved >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["num", "first", "seed"])
def round_kernel(x, out, num, first, seed, TILES: tl.constexpr, EVEN: tl.constexpr):
    """Round ``x`` (num,), float32, to ``out`` (num,), the int16 bits of bfloat16."""
    tile = (tl.program_id(0) + first).to(tl.int64) * TILES
    left = (num - tile * 1024).to(tl.int32) if not EVEN else TILES * 1024
    # all loads come before the first store, which the compiler would not pass
    values = ()
    for j in tl.static_range(8):
        values = values + (load_octant(x + tile * 1024, left, j, TILES, EVEN),)  # noqa: RUF005 -- Triton cannot unpack
    words = words_of(seed, tile, TILES)
    for j in tl.static_range(8):
        store_octant(out + tile * 1024, round_bits(values[j], noise_of(words, j)), left, j, TILES, EVEN)


def over_tiles(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    num: int,
    seed: int,
    *,
    tiles: int,
    **constants: Any,
) -> None:
    """Launch ``kernel(*tensors, *scalars, num, first, seed)`` over the tiles of ``num`` elements, whole programs first."""
    whole, rest = divmod(num, 1024 * tiles)
    with _launch.current(tensors[0].device):
        for first, programs, even in ((0, whole, True), (whole, int(rest > 0), False)):
            if programs:
                grid = (programs,)
                kernel[grid](
                    *tensors, *scalars, num, first, seed, TILES=tiles, EVEN=even, num_warps=NUM_WARPS, **constants
                )


def stochastic_round(x: Tensor, out: Tensor, seed: int, *, tiles: int = TILES) -> None:
    """Round ``x``, contiguous float32, into ``out``, contiguous bfloat16."""
    over_tiles(round_kernel, (x, out.view(torch.int16)), (), x.numel(), seed, tiles=tiles)
