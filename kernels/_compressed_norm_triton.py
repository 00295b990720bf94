"""LayerNorm and RMSNorm with a compressed normalised output as Triton kernels, one row of ``D`` elements at a time.

``D`` is a multiple of GROUP, so a group never crosses rows. A row is a tile of K = D / GROUP groups, padded to a power of
two, as in the kernels for group quantisation. Group ``k`` of row ``r`` has the number ``r K + k``.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._group_quantization_triton import buffers, decode, encode, load_parts, rows_of, store_parts
from lightning_eff.kernels.group_quantization import Packed

STAGES = tl.constexpr(3)  # of rows that backward loads ahead


@triton.jit
def added(values, PARTS: tl.constexpr):
    """Return the sum of a tile's parts."""
    value = values[0]
    for j in tl.static_range(1, PARTS):
        value += values[j]
    return value


@triton.jit
def total(values, PARTS: tl.constexpr):
    """Return the sum of a tile."""
    return tl.sum(added(values, PARTS))


@triton.jit
def times(values, others, PARTS: tl.constexpr):
    """Multiply a tile by another one, or by a number for each part."""
    results = ()
    for j in tl.static_range(PARTS):
        results = results + (values[j] * others[j],)  # noqa: RUF005 -- Triton has no starred expressions
    return results


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
    EVEN: tl.constexpr = K == K2
    C: tl.constexpr = GROUP // 8
    row = tl.program_id(0).to(tl.int64)
    values = load_parts(x + row * D, D, 8, K2, GROUP, EVEN)
    if CENTRE:
        mean = total(values, 8) / D
        centred = ()
        for j in tl.static_range(8):
            value = values[j] - mean
            if not EVEN:
                value = tl.where(rows_of(K2, GROUP, C) + j * C < D, value, 0.0)
            centred = centred + (value,)  # noqa: RUF005
        values = centred
    # r = 1 / sqrt(mean((x - mean)^2) + eps)
    r = 1.0 / tl.sqrt(total(times(values, values, 8), 8) / D + eps)
    tl.store(reciprocal + row, r)
    n = ()
    for j in tl.static_range(8):
        n = n + (values[j] * r,)  # noqa: RUF005
    results = n
    if WEIGHT:
        results = times(results, load_parts(weight, D, 8, K2, GROUP, EVEN), 8)
    if BIAS:
        shifted, b = (), load_parts(bias, D, 8, K2, GROUP, EVEN)
        for j in tl.static_range(8):
            shifted = shifted + (results[j] + b[j],)  # noqa: RUF005
        results = shifted
    store_parts(y + row * D, D, results, 8, K2, GROUP, EVEN)
    group = row * K
    codes += group * (GROUP * BITS // 8)
    encode(n, codes, scale + group, minimum + group, D, seed, group, K2, GROUP, BITS, STOCHASTIC, EVEN)


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
    EVEN: tl.constexpr = K == K2
    V: tl.constexpr = 8 // BITS
    share_w, share_b, w = (), (), ()
    for _ in tl.static_range(V):
        nothing = tl.zeros((K2, GROUP // V), dtype=tl.float32)
        share_w, share_b = share_w + (nothing,), share_b + (nothing,)  # noqa: RUF005
    if WEIGHT:
        w = load_parts(weight, D, V, K2, GROUP, EVEN)
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=STAGES):
        group = row * K
        at = codes + group * (GROUP * BITS // 8)
        n = decode(at, scale + group, minimum + group, D, K2, GROUP, BITS, EVEN)
        r = tl.load(reciprocal + row)
        d = load_parts(g + row * D, D, V, K2, GROUP, EVEN)
        sum_w, sum_b = (), ()
        for v in tl.static_range(V):
            # beyond the row d is 0
            sum_w, sum_b = sum_w + (share_w[v] + d[v] * n[v],), sum_b + (share_b[v] + d[v],)  # noqa: RUF005
        share_w, share_b = sum_w, sum_b
        if WEIGHT:
            d = times(d, w, V)
        # dx = r (w g - mean(w g) - n mean(n w g))
        along, mean = 0.0, 0.0
        if CENTRE:
            # both sums in one reduction: threads wait for each other once
            both = tl.join(added(times(n, d, V), V), added(d, V))
            along, mean = tl.split(tl.sum(tl.reshape(both, (K2 * (GROUP // V), 2)), axis=0))
        else:
            along = total(times(n, d, V), V)
        results = ()
        for v in tl.static_range(V):
            results = results + (r * (d[v] - n[v] * (along / D) - mean / D),)  # noqa: RUF005
        store_parts(dx + row * D, D, results, V, K2, GROUP, EVEN)
    program = tl.program_id(0).to(tl.int64) * D
    if WEIGHT:
        store_parts(dw + program, D, share_w, V, K2, GROUP, EVEN)
    if BIAS:
        store_parts(db + program, D, share_b, V, K2, GROUP, EVEN)


def num_warps(size: int) -> int:
    """Return the warps for a row of ``size`` elements, with 32 elements per thread."""
    return min(max(triton.next_power_of_2(size) // 1024, 1), 16)


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
            num_warps=2 * num_warps(size),
        )
    return (
        dx,
        None if dw is None or weight is None else dw.sum(0).to(weight.dtype),
        None if db is None or bias is None else db.sum(0).to(bias.dtype),
    )
