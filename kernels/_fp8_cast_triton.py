"""Triton kernels for casts to float8, in tiles of 128 x 128 or whole rows, with one read where possible.

Magnitudes are compared as the bits of ``|x|``. As integers the bits have the same order as the numbers, with infinity and
then NaN at the top. So a maximum keeps NaN, and an atomic maximum does not depend on the order.

Devices with compute capability 8.9 or later convert two numbers to float8 in one instruction. Other devices round on the
bits, in about ten instructions per number. So does Triton's interpreter, whose conversion is wrong.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels.fp8_cast import BLOCK, By, Codes, Pair, Peak

NATIVE = (8, 9)  # compute capability of the first devices that convert to E4M3
MULTIPLE = 16  # of sizes: 16 bytes are read and written at once; single bytes would each need an address, and spill
NUM_WARPS = 8  # of a tile: 64 elements per thread
MANY_WARPS = 16  # if threads wait for each other's amax: half as many registers per thread, and more programs at once
LONGEST_ROW = 16384  # elements that a program holds in registers, 32 per thread
INFINITE = tl.constexpr(0x7F800000)  # bits
TENSOR, ROWS, GROUPS, BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def magnitude(x):
    """Return the bits of ``|x|``, int32, for float32 ``x``."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, E5M2: tl.constexpr):
    """Return ``max / amax``, float32, from the bits of amax; an amax below 2^-100 counts as 2^-100."""
    amax = tl.maximum(amax, (127 - 100) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.full(amax.shape, 57344.0 if E5M2 else 448.0, tl.float32), amax)


@triton.jit
def inverse_of(scale):
    """Return ``1 / scale``, rounded once."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def encode(y, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Return the float8 codes, uint8, of float32 ``y``, rounded to nearest even and saturated; NaN stays NaN."""
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    if NATIVE:
        y = tl.maximum(y, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        y = tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        code = y.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        clamped = tl.minimum(tl.abs(y), LARGEST)
        # 2^max(e, 1 - b) by its bits; adding 2^(23 - M) times as much rounds to multiples of 2^(max(e, 1 - b) - M)
        FIRST: tl.constexpr = (128 - BIAS) << 23
        power = tl.maximum(clamped.to(tl.int32, bitcast=True) & 0x7F800000, FIRST)
        large = power + ((23 - MANTISSA) << 23)
        steps = (clamped + large.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - large
        # a step past the last of an exponent is the first of the next one
        code = steps + ((power - FIRST) >> (23 - MANTISSA))
        code = tl.where(y == y, code, 0x7F)
        code = (code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def apart(code, NATIVE: tl.constexpr):
    """Return the codes in separate registers.

    Triton 3.6 is wrong if the same registers, from the device's instruction, are both stored and transposed in shared
    memory. About two in five transposed codes of float32 tiles were wrong on an H100.
    """
    if NATIVE:
        code = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [code], dtype=tl.uint8, is_pure=False, pack=4)
    return code


@triton.jit
def within(stride, BLOCK: tl.constexpr):
    """Return the offsets in a tile from its first element, int32, for a matrix with rows of ``stride`` elements."""
    return tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK)[None, :]


@triton.jit
def tile(x, num_rows, num_columns, BLOCK: tl.constexpr):
    """Return this program's tile of ``x`` in float32, padded with zeros, and its row and column indices, int64."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    # within a tile offsets are 32 bits wide: wider ones take registers
    x += tl.program_id(0).to(tl.int64) * BLOCK * num_columns + tl.program_id(1) * BLOCK
    value = tl.load(x + within(num_columns, BLOCK), mask=inside, other=0.0)
    return value.to(tl.float32), row, column


@triton.jit
def amax_kernel(
    x, amax, turned_amax, peak, num_rows, num_columns, PEAK: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the bits of the amax of ``x`` to ``amax`` (1,), which starts at zero.

    With SCALES = ROWS, write each row's to ``amax`` and each column's to ``turned_amax``. With PEAK, do nothing if ``peak``
    is known, that is, not negative.
    """
    known = False
    if PEAK:
        known = tl.load(peak) >= 0
    if not known:
        value, row, column = tile(x, num_rows, num_columns, BLOCK)
        bits = magnitude(value)
        if SCALES == TENSOR:
            tl.atomic_max(amax, tl.max(bits))
        else:
            tl.atomic_max(amax + row, tl.max(bits, axis=1), mask=row < num_rows)
            tl.atomic_max(turned_amax + column, tl.max(bits, axis=0), mask=column < num_columns)


@triton.jit
def note(place, bits):
    """Record an amax, as bits, in ``place``, a float32 of which 0 and above are the only finite values; see ``Peak``."""
    tl.atomic_max(place, bits, mask=bits < INFINITE)


@triton.jit
def finish(largest, scale, inverse, seen, scratch, record, first_amax, second_amax, RECORDS: tl.constexpr):
    """Let the last program write what needs the amax of all programs, and leave zeros in ``scratch``."""
    tl.atomic_max(scratch, largest)
    if tl.atomic_add(scratch + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        whole = tl.atomic_xchg(scratch, 0)
        tl.store(scratch + 1, 0)
        tl.store(seen, whole.to(tl.float32, bitcast=True))
        # a number that is not finite must stay visible under any scale
        tl.store(scale, float("nan"), mask=whole >= INFINITE)
        tl.store(inverse, float("nan"), mask=whole >= INFINITE)
        if RECORDS == 3:
            note(record, tl.load(first_amax).to(tl.int32, bitcast=True))
            note(record + 1, tl.load(second_amax).to(tl.int32, bitcast=True))
        if RECORDS == 2:
            note(record, tl.load(first_amax).to(tl.int32, bitcast=True))
        if RECORDS > 0:
            note(record + RECORDS - 1, whole)


@triton.jit
def tile_kernel(
    x,
    codes,
    turned,
    inverse,
    turned_inverse,
    amax,
    turned_amax,
    scale,
    peak,
    seen,
    scratch,
    record,
    first_amax,
    second_amax,
    num_rows,
    num_columns,
    SCALES: tl.constexpr,
    GIVEN: tl.constexpr,
    PEAK: tl.constexpr,
    KNOWN: tl.constexpr,
    RECORDS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast ``x`` (R, K) of any float type to ``codes`` (R, K) if BY_ROW and ``turned`` (K, R) if BY_COLUMN.

    SCALES sets the unit that has one scale. ROWS reads the bits of amax from ``amax`` and ``turned_amax``. TENSOR uses
    ``scale`` if GIVEN. Otherwise the amax is ``peak`` if PEAK and it is not negative (as it is if KNOWN), else ``amax``, and
    the kernel writes ``scale``. With PEAK it writes the present amax to ``seen``, and with RECORDS > 0 it records this amax
    and RECORDS - 1 others, see :class:`.fp8_cast.Peak`. The last program to finish does this. Inverse scales of groups are
    written by columns.
    """
    value, row, column = tile(x, num_rows, num_columns, BLOCK)
    in_row, in_column = row < num_rows, column < num_columns
    at, turned_at = tl.program_id(0), tl.program_id(1)
    inside = in_row[:, None] & in_column[None, :]
    codes += at.to(tl.int64) * BLOCK * num_columns + turned_at * BLOCK
    turned += turned_at.to(tl.int64) * BLOCK * num_rows + at * BLOCK
    offset, turned_offset = within(num_columns, BLOCK), within(num_rows, BLOCK)
    bits = magnitude(value)
    if SCALES == TENSOR or SCALES == BLOCKS:  # noqa: SIM109 -- Triton has no "in"
        if SCALES == BLOCKS:
            s = scale_of(tl.max(bits), E5M2)
            if BY_ROW:
                tl.store(inverse + at * tl.num_programs(1) + turned_at, inverse_of(s))
            if BY_COLUMN:
                tl.store(turned_inverse + turned_at * tl.num_programs(0) + at, inverse_of(s))
        else:
            first = (at == 0) & (turned_at == 0)
            if GIVEN:
                s = tl.load(scale)
            else:
                if PEAK:
                    known = tl.load(peak)
                    top = known.to(tl.int32, bitcast=True)
                    if not KNOWN:
                        top = tl.where(known < 0, tl.load(amax), top)
                    largest = tl.max(bits)
                else:
                    top = tl.load(amax)
                s = scale_of(top, E5M2)
                tl.store(scale, s, mask=first)
            tl.store(inverse, inverse_of(s), mask=first)
        code = encode(value * s, E5M2, NATIVE)
        if BY_ROW:
            tl.store(codes + offset, code, mask=inside)
        if BY_COLUMN:
            tl.store(turned + turned_offset, tl.trans(apart(code, NATIVE)), mask=tl.trans(inside))
        if PEAK:  # at the end, when the tile takes no registers
            finish(largest, scale, inverse, seen, scratch, record, first_amax, second_amax, RECORDS)
    else:
        if BY_ROW:
            if SCALES == ROWS:
                s = scale_of(tl.load(amax + row, mask=in_row, other=0), E5M2)
                tl.store(inverse + row, inverse_of(s), mask=row < tl.where(turned_at == 0, num_rows, 0))
            else:
                s = scale_of(tl.max(bits, axis=1), E5M2)
                tl.store(inverse + turned_at.to(tl.int64) * num_rows + row, inverse_of(s), mask=in_row)
            tl.store(codes + offset, encode(value * s[:, None], E5M2, NATIVE), mask=inside)
        if BY_COLUMN:
            if SCALES == ROWS:
                s = scale_of(tl.load(turned_amax + column, mask=in_column, other=0), E5M2)
                tl.store(turned_inverse + column, inverse_of(s), mask=column < tl.where(at == 0, num_columns, 0))
            else:
                s = scale_of(tl.max(bits, axis=0), E5M2)
                tl.store(turned_inverse + at.to(tl.int64) * num_columns + column, inverse_of(s), mask=in_column)
            tl.store(turned + turned_offset, tl.trans(encode(value * s[None, :], E5M2, NATIVE)), mask=tl.trans(inside))


@triton.jit
def rows_kernel(
    x,
    codes,
    inverse,
    num_rows,
    num_columns,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Cast ``x`` (R, K) of any float type to ``codes`` (R, K) and ``inverse`` (R,), BLOCK_ROWS whole rows per program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    index = row[:, None] * num_columns + column[None, :]
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    s = scale_of(tl.max(magnitude(value), axis=1), E5M2)
    tl.store(inverse + row, inverse_of(s), mask=row < num_rows)
    tl.store(codes + index, encode(value * s[:, None], E5M2, NATIVE), mask=inside)


def warps_of(by: By, delayed: bool) -> int:
    """Return the warps of a tile."""
    return MANY_WARPS if by in ("groups", "blocks") or delayed else NUM_WARPS


def rows_of(num_columns: int) -> tuple[int, int, int]:
    """Return the rows, columns and warps of a program of ``rows_kernel``: 8192 elements, or one longer row."""
    columns = triton.next_power_of_2(num_columns)
    rows = max(8192 // columns, 1)
    return rows, columns, max(rows * columns // 1024, 4)


def cast(
    x: Tensor,
    dtype: torch.dtype,
    by: By,
    rows: bool,
    columns: bool,
    scale: Tensor | None,
    peak: Peak | None,
    *,
    native: bool | None = None,
    longest_row: int = LONGEST_ROW,
) -> Pair:
    """Cast ``x``, contiguous float32, bfloat16 or float16; see :func:`.fp8_cast.cast`.

    Sizes that are not multiples of 16 are padded with zeros in an additional pass, except if only rows are cast.

    Args:
        x: (R, K).
        dtype: of the codes.
        by: the unit that has one scale.
        rows: return (R, K).
        columns: return (K, R).
        scale: float32, (), or None.
        peak: see :class:`.fp8_cast.Peak`, or None.
        native: use the device's instruction; None uses it if there is one.
        longest_row: largest K whose rows stay in registers.
    """
    (r, k), device = x.shape, x.device
    if native is None:
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    flags = {"E5M2": dtype == torch.float8_e5m2, "NATIVE": native}
    with _launch.current(device):
        if by == "rows" and rows and not columns and k <= longest_row:
            codes, inverse = torch.empty((r, k), dtype=torch.uint8, device=device), floats(r, 1)
            block_rows, block_columns, warps = rows_of(k)
            rows_kernel[(triton.cdiv(r, block_rows),)](
                x, codes, inverse, r, k, **flags, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=warps
            )
            return Pair(Codes(codes.view(dtype), inverse), None)
        if r % MULTIPLE or k % MULTIPLE:
            x = torch.nn.functional.pad(x, (0, -k % MULTIPLE, 0, -r % MULTIPLE))
        height, width = x.shape
        across, along = triton.cdiv(r, BLOCK), triton.cdiv(k, BLOCK)
        codes = torch.empty((height, width) if rows else (0, 0), dtype=torch.uint8, device=device)
        turned = torch.empty((width, height) if columns else (0, 0), dtype=torch.uint8, device=device)
        kind = {"tensor": TENSOR, "rows": ROWS, "groups": GROUPS, "blocks": BLOCKS}[by].value
        shapes = {"tensor": (), "rows": (height, 1), "groups": (along, height), "blocks": (across, along)}
        turned_shapes = {"tensor": (), "rows": (width, 1), "groups": (across, width), "blocks": (along, across)}
        given, delayed = scale is not None, peak is not None
        if by == "tensor":
            made, inverse, seen = floats(3).unbind()
            scale, turned_inverse = scale if scale is not None else made, inverse
        else:
            scale = seen = inverse = floats(*shapes[by])
            turned_inverse = floats(*turned_shapes[by])
        # zeros: the amax of all or of each row, that of each column, and the scratch
        needs_amax = by == "rows" or (by == "tensor" and not given and not (peak is not None and peak.known))
        own_scratch = peak is not None and peak.scratch is None
        amax = inverse
        if needs_amax or own_scratch:
            amax = torch.zeros(height + width if by == "rows" else 3, dtype=torch.int32, device=device)
        scratch = amax[1:] if own_scratch else inverse if peak is None else peak.scratch
        # the kernels do not read a pointer that they do not need
        known = inverse if peak is None else peak.value
        others = () if peak is None or peak.record is None else peak.others
        record = None if peak is None or peak.record is None else peak.record.view(torch.int32)
        grid = (across, along)
        tiling = {"BLOCK": BLOCK, "num_warps": warps_of(by, delayed)}
        if needs_amax:
            amax_kernel[grid](x, amax, amax[height:], known, height, width, PEAK=delayed, SCALES=kind, **tiling)
        tile_kernel[grid](
            x,
            codes,
            turned,
            inverse,
            turned_inverse,
            amax,
            amax[height:] if by == "rows" else amax,
            scale,
            known,
            seen,
            scratch,
            scratch if record is None else record,
            *[*others, inverse, inverse][:2],
            height,
            width,
            SCALES=kind,
            GIVEN=given,
            PEAK=delayed,
            KNOWN=peak is not None and peak.known,
            RECORDS=0 if record is None else len(record),
            BY_ROW=rows,
            BY_COLUMN=columns,
            **flags,
            **tiling,
        )
    found = None
    if by == "tensor" and not given:
        found = amax[0].view(torch.float32) if peak is None else seen
    if by == "groups":
        inverse, turned_inverse = inverse.t(), turned_inverse.t()
    if by in ("rows", "groups"):
        inverse, turned_inverse = inverse[:r], turned_inverse[:k]
    return Pair(
        Codes(codes[:r, :k].contiguous().view(dtype), inverse) if rows else None,
        Codes(turned[:k, :r].contiguous().view(dtype), turned_inverse) if columns else None,
        scale if by == "tensor" else None,
        found,
    )
