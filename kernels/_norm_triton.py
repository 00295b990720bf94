"""Triton kernels for LayerNorm and RMSNorm, forward and backward, on tiles of whole rows.

A program holds rows of ``D`` elements, padded to a power of two ``D2``, in registers. A tile has several short rows, so that
every thread has work. In backward each program loops over tiles with a stride. It keeps its partial sums of ``dw`` and
``db`` in registers, element by element, until the last tile.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

TILE = 2048  # elements, or one longer row
STAGES = tl.constexpr(3)  # of tiles that backward loads ahead


@triton.jit
def forward_kernel(
    x,
    weight,
    bias,
    y,
    mean,
    reciprocal,
    eps,
    rows,
    D: tl.constexpr,
    D2: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Compute ``y`` (rows, D), ``reciprocal`` (rows,) and, if ``CENTRE``, ``mean`` (rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D2)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    index = row[:, None] * D + column[None, :]
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        m = tl.sum(value, axis=1) / D
        tl.store(mean + row, m, mask=row < rows)
        value = tl.where(inside, value - m[:, None], 0.0)
    # r = 1 / sqrt(mean((x - mean)^2) + eps)
    r = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / D + eps)
    tl.store(reciprocal + row, r, mask=row < rows)
    value *= r[:, None]
    if WEIGHT:
        value *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y + index, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    g,
    x,
    mean,
    reciprocal,
    weight,
    dx,
    dw,
    db,
    rows,
    D: tl.constexpr,
    D2: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Compute ``dx`` (rows, D) and each program's partial sums ``dw`` and ``db`` (programs, D), over strided tiles."""
    column = tl.arange(0, D2)
    share_w = tl.zeros((ROWS, D2), dtype=tl.float32)
    share_b = tl.zeros((ROWS, D2), dtype=tl.float32)
    if WEIGHT:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    for first in tl.range(tl.program_id(0).to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        index = row[:, None] * D + column[None, :]
        n = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(g + index, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(reciprocal + row, mask=row < rows, other=0.0)[:, None]
        if CENTRE:
            n -= tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        n *= r
        # beyond the row n is not 0, but d is, and so are products with it
        if WEIGHT:
            share_w += d * n
        if BIAS:
            share_b += d
        if WEIGHT:
            d *= w
        # dx = r (w g - mean(w g) - n mean(n w g))
        if CENTRE:
            # both sums in one reduction: threads wait for each other once
            along, level = tl.split(tl.sum(tl.join(n * d, d), axis=1))
            result = d - n * (along / D)[:, None] - (level / D)[:, None]
        else:
            result = d - n * (tl.sum(n * d, axis=1) / D)[:, None]
        tl.store(dx + index, (r * result).to(dx.dtype.element_ty), mask=inside)
    share = tl.program_id(0) * D + column
    if WEIGHT:
        tl.store(dw + share, tl.sum(share_w, axis=0), mask=column < D)
    if BIAS:
        tl.store(db + share, tl.sum(share_b, axis=0), mask=column < D)


def geometry(size: int) -> tuple[int, int, int, int]:
    """Return ``D2``, the rows of a tile, and the warps in forward and in backward, for rows of ``size`` elements.

    Each thread has 8 elements. Backward keeps five values per element, so from 4096 elements on its threads have 16; more
    threads would have too few registers.
    """
    filled = triton.next_power_of_2(size)
    rows = max(TILE // filled, 1)
    eights = max(rows * filled // 256, 1)
    return filled, rows, eights, max(min(eights, 8), eights // 2)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ``y``, the mean if ``centre``, and ``r`` (rows,) of a contiguous ``x`` (..., D)."""
    y, size = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // size
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    filled, tile, warps, _ = geometry(size)
    r = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(r) if centre else None
    with _launch.current(x.device):
        forward_kernel[(triton.cdiv(rows, tile),)](
            x,
            weight,
            bias,
            y,
            mean,
            r,
            eps,
            rows,
            D=size,
            D2=filled,
            ROWS=tile,
            CENTRE=centre,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            num_warps=warps,
        )
    return y, mean, r


def backward(
    g: Tensor, x: Tensor, mean: Tensor | None, r: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``dx`` in the dtype of a contiguous ``x``, and ``dw`` and ``db`` in those of ``weight`` and ``bias``."""
    g, dx, size = g.contiguous(), torch.empty_like(x), x.shape[-1]
    filled, tile, _, warps = geometry(size)
    programs = min(_launch.num_programs(x.device), triton.cdiv(len(r), tile))
    dw = None if weight is None else torch.empty(programs, size, dtype=torch.float32, device=x.device)
    db = None if bias is None else torch.empty(programs, size, dtype=torch.float32, device=x.device)
    with _launch.current(x.device):
        backward_kernel[(programs,)](
            g,
            x,
            mean,
            r,
            None if weight is None else weight.contiguous(),
            dx,
            dw,
            db,
            len(r),
            D=size,
            D2=filled,
            ROWS=tile,
            CENTRE=mean is not None,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            num_warps=warps,
        )
    return (
        dx,
        None if dw is None or weight is None else dw.sum(0).to(weight.dtype),
        None if db is None or bias is None else db.sum(0).to(bias.dtype),
    )
