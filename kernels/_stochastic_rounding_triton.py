"""A Triton kernel for stochastic rounding to bfloat16, with one read and one write.

Random numbers are Philox-4x32-7: one call gives eight elements 16 bits each. Elements are counted in tiles of ``TILE``, and
not in a program's blocks, so the numbers depend only on the seed and the index.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

TILES = 4  # of 1024 elements for each program
NUM_WARPS = 4


@triton.jit
def element_index(tile):
    """Return each element's index in the tiles ``tile`` (G,), shape (8, G, 128)."""
    octant = tl.arange(0, 8)[:, None, None]
    return tile.to(tl.int64)[None, :, None] * 1024 + octant * 128 + tl.arange(0, 128)[None, None, :]


@triton.jit
def sixteen_bits(seed, tile):
    """Return a number in [0, 2^16) for each element, int32 of shape (8, G, 128)."""
    counter = (tile[:, None] * 128 + tl.arange(0, 128)[None, :]).to(tl.uint32)
    r0, r1, r2, r3 = tl.randint4x(seed, counter, n_rounds=7)
    octant = tl.arange(0, 8)[:, None, None]
    word = octant // 2
    r01 = tl.where(word == 0, r0[None, :, :], r1[None, :, :])
    r23 = tl.where(word == 2, r2[None, :, :], r3[None, :, :])
    r = tl.where(word < 2, r01, r23).to(tl.uint32, bitcast=True)
    return tl.where(octant % 2 == 0, r & 0xFFFF, r >> 16).to(tl.int32)


@triton.jit
def round_bits(value, noise):
    """Return the bits of bfloat16, int16, of float32 ``value``; ``noise`` in [0, 2^16) decides whether it rounds up."""
    bits = value.to(tl.int32, bitcast=True)
    finite = tl.abs(value) <= 3.4028234663852886e38
    moved = tl.where(finite, bits + noise, bits)
    moved = tl.where(value == value, moved, 0x7FC00000)
    return (moved >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["seed"])
def round_kernel(x, out, num, seed, TILES: tl.constexpr):
    """Round ``x`` (num,), float32, to ``out`` (num,), the int16 bits of bfloat16."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    index = element_index(tile)
    inside = index < num
    value = tl.load(x + index, mask=inside, other=0.0)
    tl.store(out + index, round_bits(value, sixteen_bits(seed, tile)), mask=inside)


def stochastic_round(x: Tensor, out: Tensor, seed: int, *, tiles: int = TILES) -> None:
    """Round ``x``, contiguous float32, into ``out``, contiguous bfloat16."""
    if x.numel():
        with _launch.current(x.device):
            grid = (triton.cdiv(x.numel(), 1024 * tiles),)
            round_kernel[grid](x, out.view(torch.int16), x.numel(), seed, TILES=tiles, num_warps=NUM_WARPS)
