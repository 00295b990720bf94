"""LayerNorm and RMSNorm with a compressed normalised output as Triton kernels, one row of ``D`` elements at a time.

``D`` is a multiple of GROUP, so a group never crosses rows. A row is a tile of K = D / GROUP groups, padded to a power of
two, as in the kernels for group quantisation. Group ``k`` of row ``r`` has the number ``r K + k``.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._group_quantization_triton import buffers, byte_index, decode, encode, tile_index
from lightning_eff.kernels.group_quantization import Packed


@triton.jit
def total(value):
    """Return the sum of a tile."""
    return tl.sum(tl.sum(tl.sum(tl.sum(value, axis=0), axis=0), axis=0), axis=0)


@triton.jit(do_not_specialize=["seed"])
def forward_kernel(
    x,
    weight,
    bias,
    y,
    codes,
    scale,
    minimum,
    reciprocal,
    eps,
    seed,
    K: tl.constexpr,
    K2: tl.constexpr,
    CENTRE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Compute one row per program: ``y`` (rows, D), ``reciprocal`` (rows,), and the codes, scales and minima of ``n``."""
    D: tl.constexpr = K * GROUP
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K2)
    column = tile_index(k, GROUP, BITS)
    inside = column < D
    value = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        value = tl.where(inside, value - total(value) / D, 0.0)
    # r = 1 / sqrt(mean((x - mean)^2) + eps)
    r = 1.0 / tl.sqrt(total(value * value) / D + eps)
    n = value * r
    result = n
    if WEIGHT:
        result *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * D + column, result.to(y.dtype.element_ty), mask=inside)
    tl.store(reciprocal + row, r)
    group = row * K + k
    byte, step, low = encode(n, inside, seed, group, GROUP, BITS, STOCHASTIC)
    there = k < K
    tl.store(codes + byte_index(group, GROUP, BITS), byte, mask=there[None, :, None])
    tl.store(scale + group, step, mask=there)
    tl.store(minimum + group, low, mask=there)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    g,
    codes,
    scale,
    minimum,
    reciprocal,
    weight,
    dx,
    dw,
    db,
    rows,
    K: tl.constexpr,
    K2: tl.constexpr,
    CENTRE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """Compute ``dx`` (rows, D) and each program's partial sums ``dw`` and ``db`` (programs, D), over strided rows."""
    D: tl.constexpr = K * GROUP
    k = tl.arange(0, K2)
    there = k < K
    column = tile_index(k, GROUP, BITS)
    inside = column < D
    share_w = tl.zeros(column.shape, dtype=tl.float32)
    share_b = tl.zeros(column.shape, dtype=tl.float32)
    if WEIGHT:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        group = row * K + k
        byte = tl.load(codes + byte_index(group, GROUP, BITS), mask=there[None, :, None], other=0)
        step = tl.load(scale + group, mask=there, other=0.0)
        low = tl.load(minimum + group, mask=there, other=0.0)
        r = tl.load(reciprocal + row)
        n = decode(byte, step, low, BITS)
        d = tl.load(g + row * D + column, mask=inside, other=0.0).to(tl.float32)
        share_w += d * n
        share_b += d
        if WEIGHT:
            d *= w
        # dx = r (w g - mean(w g) - n mean(n w g))
        result = d - n * (total(n * d) / D)
        if CENTRE:
            result -= total(d) / D
        tl.store(dx + row * D + column, (r * result).to(dx.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(dw + tl.program_id(0) * D + column, share_w, mask=inside)
    if BIAS:
        tl.store(db + tl.program_id(0) * D + column, share_b, mask=inside)


def num_warps(size: int) -> int:
    """Return the warps for a row of ``size`` elements, with 16 elements per thread."""
    return min(max(triton.next_power_of_2(size) // 512, 1), 16)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    bits: int,
    group_size: int,
    seed: int | None,
) -> tuple[Tensor, Packed, Tensor]:
    """Return ``y``, the compressed ``n`` and ``r`` (..., 1) of ``x`` (..., D); ``group_size`` divides ``D``."""
    x = x.contiguous()
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    y, size = torch.empty_like(x), x.shape[-1]
    rows, packed = x.numel() // size, buffers(x.numel(), bits, group_size, x.device)
    r = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    with _launch.current(x.device):
        forward_kernel[(rows,)](
            x,
            weight,
            bias,
            y,
            *packed,
            r,
            eps,
            seed or 0,
            K=size // group_size,
            K2=triton.next_power_of_2(size // group_size),
            CENTRE=centre,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            GROUP=group_size,
            BITS=bits,
            STOCHASTIC=seed is not None,
            num_warps=num_warps(size),
        )
    return y, Packed(*packed, x.shape, x.dtype, bits, group_size), r


def backward(
    g: Tensor, packed: Packed, r: Tensor, weight: Tensor | None, bias: Tensor | None, centre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``dx`` in the dtype of ``g``, and ``dw`` and ``db`` in those of ``weight`` and ``bias``."""
    g = g.contiguous()
    weight = None if weight is None else weight.contiguous()
    dx, size = torch.empty_like(g), g.shape[-1]
    rows = g.numel() // size
    programs = min(_launch.num_programs(g.device), rows)
    dw = None if weight is None else torch.empty(programs, size, dtype=torch.float32, device=g.device)
    db = None if bias is None else torch.empty(programs, size, dtype=torch.float32, device=g.device)
    with _launch.current(g.device):
        backward_kernel[(programs,)](
            g,
            packed.codes,
            packed.scale,
            packed.minimum,
            r,
            weight,
            dx,
            dw,
            db,
            rows,
            K=size // packed.group_size,
            K2=triton.next_power_of_2(size // packed.group_size),
            CENTRE=centre,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            GROUP=packed.group_size,
            BITS=packed.bits,
            num_warps=num_warps(size),
        )
    return (
        dx,
        None if dw is None or weight is None else dw.sum(0).to(weight.dtype),
        None if db is None or bias is None else db.sum(0).to(bias.dtype),
    )
