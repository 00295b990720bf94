"""Products with blockwise scales by cuBLASLt, through ``torch.nn.functional.scaled_mm``, or by our Triton kernel.

cuBLASLt has these products on Hopper from CUDA 12.9 on. torch's rules for them (aten/src/ATen/native/cuda/ScaledBlas.cpp of
PyTorch 2.13) are written down here, and operands are prepared to satisfy them. :func:`cublas` compares a small product with
the reference on the device before a run uses them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.kernels import fp8_matmul
from lightning_eff.precision._scaling.casts import BLOCK, Codes, cast_pair
from lightning_eff.precision._scaling.products import MULTIPLE, padded

ROWS = 4  # of the left operand: their scales are read 16 bytes at a time
LENGTH = 4  # of a row of a 128 x 128 grid of scales, likewise
TOLERANCE = 2.0**-10  # of the trial; Hopper sums 128 products in about 14 bits
GROUPS, BLOCKS = "BlockWise1x128", "BlockWise128x128"


class Call(NamedTuple):
    """The arguments of ``torch.nn.functional.scaled_mm``.

    Attributes:
        left: float8, (R, K), row-major.
        right: float8, (K, C), column-major.
        left_scale: inverse scales, float32, (R, ceil(K / 128)), by columns.
        right_scale: inverse scales, float32: (C, ceil(K / 128)) by columns for groups, and ceil(K / 128) padded to a multiple
            of 4, by ceil(C / 128), by columns, for blocks.
        right_recipe: the name of the right operand's scaling; the left one has groups.
    """

    left: Tensor
    right: Tensor
    left_scale: Tensor
    right_scale: Tensor
    right_recipe: str


def by_triton(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return the product by :func:`.fp8_matmul.matmul`; ``fast`` has no effect."""
    return fp8_matmul.matmul(a, b, dtype)


def by_cublas(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return the product by cuBLASLt, of ``a`` with groups and ``b`` with groups or blocks; ``fast`` has no effect."""
    call = for_cublas(a, b)
    kind: Any = F.ScalingType  # pyright: ignore[reportAttributeAccessIssue] -- not in all supported versions of torch
    scaled_mm: Any = F.scaled_mm  # pyright: ignore[reportAttributeAccessIssue]
    out = dtype if dtype in fp8_matmul.OUT else torch.float32
    y = scaled_mm(
        call.left,
        call.right,
        call.left_scale,
        getattr(kind, GROUPS),
        call.right_scale,
        getattr(kind, call.right_recipe),
        output_dtype=out,
    )
    return y[: a.codes.shape[0], : b.codes.shape[0]].to(dtype)


def for_cublas(a: Codes, b: Codes) -> Call:
    """Prepare ``a b^T``: pad sizes with zeros and scales with ones. The first rows and columns of the result are the product.

    Raises:
        ValueError: if ``a`` has one scale per 128 x 128.
    """
    (r, k), c = a.codes.shape, b.codes.shape[0]
    if a.inverse.shape[0] != r:
        raise ValueError(
            f"for_cublas(a of shape {(r, k)} with scales of shape {tuple(a.inverse.shape)}): expected one scale per 1 x 128."
            " Use by_triton."
        )
    along, rows, columns = -k % MULTIPLE, -r % ROWS, -c % MULTIPLE
    left, right = a.codes, b.codes
    if along or rows:
        left = padded(left, along, rows)
    if along or columns:
        right = padded(right, along, columns)
    if b.inverse.shape[0] == c:
        return Call(left, right.t(), _by_columns(a.inverse, rows), _by_columns(b.inverse, columns), GROUPS)
    grid = F.pad(b.inverse, (0, -b.inverse.shape[1] % LENGTH), value=1.0).contiguous()
    return Call(left, right.t(), _by_columns(a.inverse, rows), grid.t(), BLOCKS)


def _by_columns(inverse: Tensor, rows: int) -> Tensor:
    return F.pad(inverse.t(), (0, rows), value=1.0).contiguous().t()


def cublas(device: torch.device) -> str | None:
    """Return why cuBLASLt does not multiply with blockwise scales on a CUDA device, or None if a trial shows that it does."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if torch.cuda.get_device_capability(device) != (9, 0) or version < (12, 9):
        return "it needs Hopper and CUDA 12.9"
    return trial(by_cublas, device)


def trial(product: Any, device: torch.device) -> str | None:
    """Return how ``product`` fails on small products of the three kinds of a layer, or None if it does not."""
    generator = torch.Generator(device).manual_seed(0)
    m, n, k = 2 * BLOCK + 8, 2 * BLOCK + 16, 3 * BLOCK + 32
    x, w = (torch.randn(size, k, generator=generator, device=device) for size in (m, n))
    for left, square, dtype in (
        (torch.float8_e4m3fn, True, torch.bfloat16),
        (torch.float8_e5m2, True, torch.bfloat16),
        (torch.float8_e5m2, False, torch.float32),
    ):
        a = cast_pair(x, left, "blockwise").rows
        b = cast_pair(w, torch.float8_e4m3fn, "blockwise", square=square).rows
        assert a is not None and b is not None
        expected = fp8_matmul.reference_matmul(a, b, torch.float32)
        try:
            error = float((product(a, b, dtype, False).float() - expected).norm() / expected.norm())
        except (RuntimeError, ValueError, TypeError, AttributeError) as e:  # torch calls its signature a prototype
            return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}"
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
        if not error < TOLERANCE + rounding:
            return f"a trial product is off by {error:.1%}"
    return None
