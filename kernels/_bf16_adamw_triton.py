"""AdamW on bfloat16 weights and moments as one Triton kernel: each of the four is read once, three are written."""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels._stochastic_rounding_triton import (
    load_octant,
    noise_of,
    over_tiles,
    round_bits,
    store_octant,
    words_of,
)

TILES = 4  # of 1024 elements for each program: 4 consecutive elements of each octant for each thread


@triton.jit
def from_bits(bits):
    """Convert bits of bfloat16 to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num", "first", "seed"])
def adamw_kernel(
    p,
    g,
    m,
    v,
    keep,
    size,
    b1,
    b2,
    root,
    eps,
    num,
    first,
    seed,
    HALF: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Update ``p``, ``m`` and ``v`` (num,), int16 bits, in place; ``g`` has bits too if HALF, else float32.

    ``keep`` is 1 - lr wd, ``size`` is lr / (1 - b1^t), ``root`` is 1 / sqrt(1 - b2^t).
    """
    tile = (tl.program_id(0) + first).to(tl.int64) * TILES
    left = (num - tile * 1024).to(tl.int32) if not EVEN else TILES * 1024
    start = tile * 1024
    for_value, for_first, for_second = (
        words_of(3 * seed, tile, TILES),
        words_of(3 * seed + 1, tile, TILES),
        words_of(3 * seed + 2, tile, TILES),
    )
    for j in tl.static_range(8):
        grad = load_octant(g + start, left, j, TILES, EVEN)
        if HALF:
            grad = from_bits(grad)
        moment = from_bits(load_octant(m + start, left, j, TILES, EVEN))
        second = from_bits(load_octant(v + start, left, j, TILES, EVEN))
        value = from_bits(load_octant(p + start, left, j, TILES, EVEN)) * keep
        moment += (grad - moment) * (1.0 - b1)
        second = b2 * second + (1.0 - b2) * grad * grad
        value -= size * moment / (tl.sqrt(second) * root + eps)
        store_octant(p + start, round_bits(value, noise_of(for_value, j)), left, j, TILES, EVEN)
        store_octant(m + start, round_bits(moment, noise_of(for_first, j)), left, j, TILES, EVEN)
        store_octant(v + start, round_bits(second, noise_of(for_second, j)), left, j, TILES, EVEN)


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    keep: float,
    size: float,
    b1: float,
    b2: float,
    root: float,
    eps: float,
    seed: int,
    *,
    tiles: int = TILES,
) -> None:
    """Do one step on contiguous tensors."""
    if not p.numel():
        return
    bits = g.dtype == torch.bfloat16
    grad = g.view(torch.int16) if bits else g.float()
    held = (t.detach().view(torch.int16) for t in (m, v))
    scalars = keep, size, b1, b2, 1 / root, eps
    over_tiles(
        adamw_kernel, (p.detach().view(torch.int16), grad, *held), scalars, p.numel(), seed, tiles=tiles, HALF=bits
    )
