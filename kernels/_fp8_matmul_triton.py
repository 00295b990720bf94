"""A Triton kernel for float8 products with blockwise scales: one dot per 128 of the contraction, added in float32.

The dot of a block starts from zero, so tensor cores never sum more than 128 products in their own precision. The kernel
multiplies the result by the scales and adds it in registers, as in DeepSeek-V3 (section 3.3.2). If one operand has blocks of
128 x 128, its tile has one scale, which halves the multiplications per result. The kernel multiplies the inverse scales
first. Only results below 2^-100 can lose bits by that.

Scales of groups are stored by columns, so that the scales of a step are neighbours in memory. The scales of the next step
are loaded before the dot of this one.

CONFIGURATIONS are tiles, warps and stages of loads in flight. They differ in speed only, and :mod:`._tuning` times them. The
first one is used without timing. sm_90 has 255 registers per thread: tiles of 128 x 128 fit if ``b`` has blocks of 128 x 128.
With a scale per 1 x 128 they need more, so tiles have 64 rows or columns. A side of a tile cannot be longer than a block. K is
padded with zeros to a multiple of 16.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch, _tuning
from lightning_eff.kernels.fp8_cast import Codes

LARGE = (128, 128, 8, 3)  # rows of a, rows of b, warps, stages of loads in flight
SMALL = (64, 128, 4, 3)
WITH_BLOCKS = (LARGE, (128, 128, 8, 4), SMALL, (64, 128, 4, 4), (128, 64, 4, 4))  # if b has blocks
WITH_GROUPS = (SMALL, (64, 128, 4, 4), (128, 64, 4, 4))
MULTIPLE = 16  # of K: 16 bytes are read at once
LEAST = 90  # the first supported architecture, sm_90
SUPER = 8  # tiles of a whose programs run together and read the same b


@triton.jit
def matmul_kernel(
    a,
    b,
    y,
    a_inverse,
    b_inverse,
    M,
    N,
    K,
    a_step,
    b_step,
    A_BLOCKS: tl.constexpr,
    B_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUPER: tl.constexpr,
):
    """Multiply ``a`` (M, K) and ``b`` (N, K), float8, into ``y`` (M, N) of any float type.

    Inverse scales are float32 with shape (M or N, K / 128), by columns that are ``a_step`` and ``b_step`` apart. With A_BLOCKS
    or B_BLOCKS the shape is (M / 128 or N / 128, K / 128), by rows.
    """
    across, along = tl.cdiv(N, BLOCK_N), tl.cdiv(K, 128)
    width = SUPER * across
    first = tl.program_id(0) // width * SUPER
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, SUPER)
    tile_m = first + tl.program_id(0) % width % height
    tile_n = tl.program_id(0) % width // height
    first_m, first_n = tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # offsets within a tile are 32 bits wide, to save registers
    rows, columns = (M - first_m).to(tl.int32), (N - first_n).to(tl.int32)
    # rows beyond the last one read it again, and their results are not written, so loads need no mask
    row, column = tl.minimum(m, rows - 1), tl.minimum(n, columns - 1)
    k = tl.arange(0, 128)
    a_at = a + first_m * K + row[:, None] * K + k[None, :]
    b_at = b + first_n * K + column[:, None] * K + k[None, :]
    a_scale = a_inverse + (tile_m * BLOCK_M // 128 * along if A_BLOCKS else first_m + row)
    b_scale = b_inverse + (tile_n * BLOCK_N // 128 * along if B_BLOCKS else first_n + column)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    of_a, of_b = tl.load(a_scale), tl.load(b_scale)
    for i in range(along):
        if EVEN_K:
            left, right = tl.load(a_at + i * 128), tl.load(b_at + i * 128)
        else:
            there = (k < K - i * 128)[None, :]
            left = tl.load(a_at + i * 128, mask=there, other=0.0)
            right = tl.load(b_at + i * 128, mask=there, other=0.0)
        # the scales of the last step are loaded again instead of those beyond it
        a_scale += a_step if i + 1 < along else 0
        b_scale += b_step if i + 1 < along else 0
        next_a, next_b = tl.load(a_scale), tl.load(b_scale)
        part = tl.dot(left, right.T)
        # y += part / s_a / s_b
        if A_BLOCKS and B_BLOCKS:
            total += part * (of_a * of_b)
        elif A_BLOCKS:
            total += part * (of_a * of_b)[None, :]
        elif B_BLOCKS:
            total += part * (of_a * of_b)[:, None]
        else:
            total += part * (of_a[:, None] * of_b[None, :])
        of_a, of_b = next_a, next_b
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    y += first_m * N + first_n
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def matmul(a: Codes, b: Codes, y: Tensor, *, configuration: tuple[int, int, int, int] | None = None) -> None:
    """Write ``a b^T`` to ``y`` (M, N), float32, bfloat16 or float16; see :func:`.fp8_matmul.matmul`."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    a_blocks, b_blocks = a.inverse.shape[0] != m, b.inverse.shape[0] != n
    left, right = a.codes, b.codes
    if pad := -k % MULTIPLE:
        left, right = (torch.nn.functional.pad(t.view(torch.uint8), (0, pad)).view(t.dtype) for t in (left, right))
    a_inverse, b_inverse = by_columns(a.inverse, a_blocks), by_columns(b.inverse, b_blocks)

    def run(configuration: tuple[int, int, int, int]) -> None:
        block_m, block_n, num_warps, num_stages = configuration
        matmul_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            left,
            right,
            y,
            a_inverse,
            b_inverse,
            m,
            n,
            k + pad,
            1 if a_blocks else a_inverse.stride(1),
            1 if b_blocks else b_inverse.stride(1),
            A_BLOCKS=a_blocks,
            B_BLOCKS=b_blocks,
            EVEN_K=(k + pad) % 128 == 0,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SUPER=SUPER,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    with _launch.current(y.device):
        if configuration is None:
            sizes = (_tuning.step_of(m), n, k, a_blocks, b_blocks)
            key = ("fp8_matmul", *sizes, left.dtype, right.dtype, y.dtype)
            configuration = _tuning.choose(key, candidates(m, b_blocks), run, y.device)
        run(configuration)


def candidates(m: int, b_blocks: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Return the configurations to time, the default first."""
    found = WITH_BLOCKS if b_blocks else WITH_GROUPS
    if m > 64:
        return found
    return (SMALL, *(c for c in found if c[0] <= 64 and c != SMALL))


def by_columns(inverse: Tensor, blocks: bool) -> Tensor:
    """Return scales as the kernel reads them: those of groups by columns, those of blocks by rows."""
    if blocks:
        return inverse.contiguous()
    return inverse if inverse.stride(0) == 1 or inverse.shape[0] == 1 else inverse.t().contiguous().t()
