"""AdamW on bfloat16 weights and moments as one Triton kernel: each of the four is read once, three are written."""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._stochastic_rounding_triton import element_index, round_bits, sixteen_bits

TILES = 2  # of 1024 elements for each program
NUM_WARPS = 4


@triton.jit
def from_bits(bits):
    """Convert bits of bfloat16 to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(p, g, m, v, keep, size, b1, b2, root, eps, num, seed, HALF: tl.constexpr, TILES: tl.constexpr):
    """Update ``p``, ``m`` and ``v`` (num,), int16 bits, in place; ``g`` has bits too if HALF, else float32.

    ``keep`` is 1 - lr wd, ``size`` is lr / (1 - b1^t), ``root`` is sqrt(1 - b2^t).
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    index = element_index(tile)
    inside = index < num
    grad = tl.load(g + index, mask=inside, other=0)
    if HALF:
        grad = from_bits(grad)
    first = from_bits(tl.load(m + index, mask=inside, other=0))
    second = from_bits(tl.load(v + index, mask=inside, other=0))
    value = from_bits(tl.load(p + index, mask=inside, other=0)) * keep
    first += (grad - first) * (1.0 - b1)
    second = b2 * second + (1.0 - b2) * grad * grad
    value -= size * first / (tl.sqrt(second) / root + eps)
    tl.store(p + index, round_bits(value, sixteen_bits(3 * seed, tile)), mask=inside)
    tl.store(m + index, round_bits(first, sixteen_bits(3 * seed + 1, tile)), mask=inside)
    tl.store(v + index, round_bits(second, sixteen_bits(3 * seed + 2, tile)), mask=inside)


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
    with _launch.current(p.device):
        adamw_kernel[(triton.cdiv(p.numel(), 1024 * tiles),)](
            p.detach().view(torch.int16),
            grad,
            *held,
            keep,
            size,
            b1,
            b2,
            root,
            eps,
            p.numel(),
            seed,
            HALF=bits,
            TILES=tiles,
            num_warps=NUM_WARPS,
        )
