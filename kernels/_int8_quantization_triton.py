"""A Triton kernel that quantises rows to int8, with one read and one write for rows of up to 16384 elements.

A program works on one row, in tiles of 1024 elements with eight octants, as the kernels for stochastic rounding do. Longer rows
are read twice, in blocks of 16384 elements. Their second read comes from the cache.

The noise is that of the kernels for group quantisation. It depends on the seed, the row and the column.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._group_quantization_triton import MAGIC, centred
from lightning_eff.kernels._stochastic_rounding_triton import load_octant, store_octant, words_of

MOST_TILES = 16  # of 1024 elements that a program holds in registers, 32 for each thread


@triton.jit
def magnitude(x):
    """Return the bits of ``|x|``, int32, in the order of the numbers, with NaN at the top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_scaled(x, factor, left, OCTANT: tl.constexpr, FACTOR: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr):
    """Load an octant in float32, multiplied by ``factor`` if FACTOR."""
    value = load_octant(x, left, OCTANT, TILES, EVEN).to(tl.float32)
    if FACTOR:
        value *= load_octant(factor, left, OCTANT, TILES, EVEN)
    return value


@triton.jit
def store_codes(
    q,
    values,
    inverse,
    left,
    seed,
    tile,
    STOCHASTIC: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store the codes of eight octants."""
    if STOCHASTIC:
        words = words_of(seed, tile, TILES)
    for j in tl.static_range(8):
        # q = floor(clamp(x / s) + u), the nearest integer to clamp(x / s) + u - 1/2
        code = tl.minimum(tl.maximum(values[j] * inverse, -127.0), 127.0)
        if STOCHASTIC:
            code += centred(words[j // 2].to(tl.uint32, bitcast=True), j % 2 == 1)
        store_octant(q, (code + MAGIC).to(tl.int32, bitcast=True).to(tl.int8), left, j, TILES, EVEN)


@triton.jit(do_not_specialize=["seed"])
def rows_kernel(
    x,
    factor,
    q,
    scale,
    columns,
    seed,
    FACTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Quantise ``x factor`` (rows, columns) to ``q``, int8, and ``scale`` (rows,), one row per program.

    WHOLE says that TILES tiles hold the row, EVEN that they have no other elements.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = row * tl.cdiv(columns, 1024)
    x += row * columns
    q += row * columns
    largest = tl.zeros((TILES, 128), tl.int32)
    values = ()
    if WHOLE:
        for j in tl.static_range(8):
            values = values + (load_scaled(x, factor, columns, j, FACTOR, TILES, EVEN),)  # noqa: RUF005
            largest = tl.maximum(largest, magnitude(values[j]))
    else:
        for start in range(0, columns, TILES * 1024):
            for j in tl.static_range(8):
                value = load_scaled(x + start, factor + start, columns - start, j, FACTOR, TILES, EVEN)
                largest = tl.maximum(largest, magnitude(value))
    amax = tl.max(largest).to(tl.float32, bitcast=True)
    # s = max|x| / 127; NaN and infinity make it not finite
    tl.store(scale + row, amax / 127.0)
    inverse = 127.0 / tl.maximum(amax, 1e-36)
    if WHOLE:
        store_codes(q, values, inverse, columns, seed, tile, STOCHASTIC, TILES, EVEN)
    else:
        for start in range(0, columns, TILES * 1024):
            values = ()
            for j in tl.static_range(8):
                value = load_scaled(x + start, factor + start, columns - start, j, FACTOR, TILES, EVEN)
                values = values + (value,)  # noqa: RUF005
            store_codes(
                q + start, values, inverse, columns - start, seed, tile + start // 1024, STOCHASTIC, TILES, EVEN
            )


def quantize_rows(
    x: Tensor, factor: Tensor | None, q: Tensor, scale: Tensor, seed: int | None, *, most_tiles: int = MOST_TILES
) -> None:
    """Quantise a contiguous ``x`` (rows, columns) into ``q`` and ``scale``; longer rows than ``most_tiles`` are read twice."""
    rows, columns = x.shape
    if not x.numel():
        scale.zero_()
        return
    tiles = min(triton.next_power_of_2(triton.cdiv(columns, 1024)), most_tiles)
    with _launch.current(x.device):
        rows_kernel[(rows,)](
            x,
            factor,
            q,
            scale,
            columns,
            seed or 0,
            FACTOR=factor is not None,
            STOCHASTIC=seed is not None,
            WHOLE=columns <= tiles * 1024,
            TILES=tiles,
            EVEN=columns % (tiles * 1024) == 0,
            num_warps=tiles,
        )
