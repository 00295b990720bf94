"""A Triton kernel for float8 products with blockwise scales: one dot per 128 of the contraction, added in float32.

The dot of a block starts from zero, so tensor cores never sum more than 128 products in their own precision. The kernel
multiplies the result by the scales and adds it in registers, as in DeepSeek-V3 (section 3.3.2). If one operand has blocks of
128 x 128, its tile has one scale, which halves the multiplications per result. The kernel multiplies the inverse scales
first. Only results below 2^-100 can lose bits by that.

There are two configurations, chosen by their registers and not by timing (sm_90 has 255). Tiles of 128 x 128 take 253 to 255
if ``b`` has a scale per 1 x 128, and 179 to 185 if it has blocks. So they are used if ``b`` has blocks and ``a`` has more
than 64 rows. Otherwise tiles have 64 x 128 (163 to 210 registers). A side of a tile cannot be longer than a block. K is
padded with zeros to a multiple of 16.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels.fp8_cast import Codes

LARGE = (128, 128, 8, 3)  # rows of a, rows of b, warps, stages of loads in flight
SMALL = (64, 128, 4, 3)
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
    A_BLOCKS: tl.constexpr,
    B_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUPER: tl.constexpr,
):
    """Multiply ``a`` (M, K) and ``b`` (N, K), float8, into ``y`` (M, N) of any float type.

    Inverse scales are float32 with shape (M or N, K / 128). With A_BLOCKS or B_BLOCKS it is (M / 128 or N / 128, K / 128).
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
    a_scale = a_inverse + (tile_m * BLOCK_M // 128 if A_BLOCKS else first_m + row) * along
    b_scale = b_inverse + (tile_n * BLOCK_N // 128 if B_BLOCKS else first_n + column) * along
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(along):
        if EVEN_K:
            left, right = tl.load(a_at + i * 128), tl.load(b_at + i * 128)
        else:
            there = (k < K - i * 128)[None, :]
            left = tl.load(a_at + i * 128, mask=there, other=0.0)
            right = tl.load(b_at + i * 128, mask=there, other=0.0)
        part = tl.dot(left, right.T)
        # y += part / s_a / s_b
        of_a, of_b = tl.load(a_scale + i), tl.load(b_scale + i)
        if A_BLOCKS and B_BLOCKS:
            total += part * (of_a * of_b)
        elif A_BLOCKS:
            total += part * (of_a * of_b)[None, :]
        elif B_BLOCKS:
            total += part * (of_a * of_b)[:, None]
        else:
            total += part * (of_a[:, None] * of_b[None, :])
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    y += first_m * N + first_n
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def matmul(a: Codes, b: Codes, y: Tensor, *, configuration: tuple[int, int, int, int] | None = None) -> None:
    """Write ``a b^T`` to ``y`` (M, N), float32, bfloat16 or float16; see :func:`.fp8_matmul.matmul`."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    block_m, block_n, num_warps, num_stages = configuration or (SMALL if m <= 64 or b.inverse.shape[0] == n else LARGE)
    left, right = a.codes, b.codes
    if pad := -k % MULTIPLE:
        left, right = (torch.nn.functional.pad(t.view(torch.uint8), (0, pad)).view(t.dtype) for t in (left, right))
    with _launch.current(y.device):
        matmul_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            left,
            right,
            y,
            a.inverse,
            b.inverse,
            m,
            n,
            k + pad,
            A_BLOCKS=a.inverse.shape[0] != m,
            B_BLOCKS=b.inverse.shape[0] != n,
            EVEN_K=(k + pad) % 128 == 0,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SUPER=SUPER,
            num_warps=num_warps,
            num_stages=num_stages,
        )
