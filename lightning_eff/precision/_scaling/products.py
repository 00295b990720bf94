"""Products of float8 matrices: emulated, or by ``torch._scaled_mm`` under CUDA's rules; blockwise ones are in ``blocks``.

The CPU's ``_scaled_mm`` accepts shapes, layouts and types that CUDA refuses. CUDA's rules are therefore written down here
(aten/src/ATen/native/cuda/ScaledBlas.cpp of PyTorch 2.11 to 2.13), and operands are prepared to satisfy them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_eff.kernels import fp8_matmul
from lightning_eff.precision._scaling.casts import Codes

Product = Callable[[Codes, Codes, torch.dtype, bool], Tensor]
"""``f(a, b, dtype, fast)`` is ``a b^T`` in ``dtype``, (R, C), of ``a`` (R, K) and ``b`` (C, K)."""

MULTIPLE = 16  # of K and C, on CUDA
CAPABILITY = (8, 9)  # the first NVIDIA GPUs with float8 matrix units
_multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] -- no public name has this signature
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT = (torch.float32, torch.bfloat16, torch.float16)


def emulated(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return the product, computed in float32; ``fast`` has no effect.

    Codes are multiplied and the sum is scaled, block by block of the contraction where scales are blockwise. Factors are then
    exact in TF32 and bfloat16 too, whatever ``torch.set_float32_matmul_precision`` allows.
    """
    of_a, of_b = a.by_row, b.by_row
    if of_a.ndim == 0 or of_a.shape[1] == 1:
        y = a.codes.float() @ b.codes.float().t()
        return y.mul_(of_a).mul_(of_b.t()).to(dtype)
    return fp8_matmul.reference_matmul(a, b, dtype)


def scaled_mm(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return the product by the CPU's ``torch._scaled_mm``, with one scale per operand or per row."""
    scales = (a.inverse, b.inverse.t()) if a.inverse.ndim else (a.inverse, b.inverse)
    out = dtype if dtype in _OUT else torch.float32
    return _multiply(a.codes, b.codes.t(), *scales, out_dtype=out, use_fast_accum=fast).to(dtype)


def scaled_mm_on_cuda(a: Codes, b: Codes, dtype: torch.dtype, fast: bool, *, exact_by_rows: bool) -> Tensor:
    """Return the product by CUDA's ``torch._scaled_mm``, with operands prepared by :func:`for_cuda`.

    Args:
        a: (R, K), with one scale in total or one per row.
        b: (C, K), likewise.
        dtype: the dtype of the result.
        fast: whether CUDA may accumulate in fewer bits than float32.
        exact_by_rows: whether there is a good kernel for rowwise scales without fast accumulation. Otherwise the product is
            computed without scales in float32, and scaled afterwards, as in torchao (``addmm_float8_unwrapped`` in 0.18).
    """
    if a.inverse.ndim and not fast and not exact_by_rows:
        one = torch.ones((), device=a.codes.device)
        y = scaled_mm_on_cuda(Codes(a.codes, one), Codes(b.codes, one), torch.float32, fast, exact_by_rows=False)
        return y.mul_(a.inverse).mul_(b.inverse.t()).to(dtype)
    call = for_cuda(a, b, dtype)
    if not torch.compiler.is_compiling():
        check_for_cuda(call)
    y = _multiply(
        call.left, call.right, call.left_scale, call.right_scale, out_dtype=call.out_dtype, use_fast_accum=fast
    )
    return y[:, : b.codes.shape[0]].to(dtype)


def scaled_mm_for(device: torch.device) -> Product:
    """Return ``torch._scaled_mm`` for a device.

    Hopper's cuBLAS supports rowwise scales from CUDA 12.9. Elsewhere CUTLASS does, which is slow without fast accumulation.
    """
    if device.type != "cuda":
        return scaled_mm
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    by_cublas = torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)
    return functools.partial(scaled_mm_on_cuda, exact_by_rows=by_cublas)


class Call(NamedTuple):
    """The arguments of CUDA's ``_scaled_mm``.

    Attributes:
        left: float8, (R, K).
        right: float8, (K, C).
        left_scale: float32, () or (R, 1), inverse scales.
        right_scale: float32, () or (1, C).
        out_dtype: the dtype of the result.
    """

    left: Tensor
    right: Tensor
    left_scale: Tensor
    right_scale: Tensor
    out_dtype: torch.dtype


def for_cuda(a: Codes, b: Codes, dtype: torch.dtype) -> Call:
    """Prepare ``a b^T`` for CUDA: pad K and C with zeros to multiples of 16, and use bfloat16 with rowwise scales.

    The first C columns of the result are the product. Padding with zeros is exact.
    """
    k, c = -a.codes.shape[1] % MULTIPLE, -b.codes.shape[0] % MULTIPLE
    left, right, right_scale = a.codes, b.codes, b.inverse
    if k:
        left = padded(left, k, 0)
    if k or c:
        right = padded(right, k, c)
    out = dtype if dtype in _OUT else torch.float32
    if a.inverse.ndim == 0:
        return Call(left, right.t(), a.inverse, right_scale, out)
    right_scale = torch.nn.functional.pad(right_scale.t(), (0, c), value=1.0)
    return Call(left, right.t(), a.inverse, right_scale.contiguous(), torch.bfloat16)


def padded(codes: Tensor, columns: int, rows: int) -> Tensor:
    """Return codes with more columns and rows of zeros."""
    larger = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows))  # the byte 0 is zero
    return larger.view(codes.dtype)


def check_for_cuda(call: Call) -> None:
    """Check CUDA's rules for ``torch._scaled_mm`` with one scale per operand, or one per row and column.

    It looks only at shapes, strides and dtypes, so it works for tensors on any device.

    Raises:
        ValueError: if a rule is broken, with its name.
    """
    left, right, left_scale, right_scale, out_dtype = call
    (r, k), (k2, c) = left.shape, right.shape
    by_rows = left_scale.numel() != 1 or left_scale.ndim == 2
    expected = ((r, 1), (1, c)) if by_rows else ((), ())
    rules = {
        "the contraction has the same length in both operands": k == k2,
        "operands are float8, and not both E5M2": left.dtype in _FLOAT8
        and right.dtype in _FLOAT8
        and not left.dtype == right.dtype == torch.float8_e5m2,
        "the left operand is row-major": left.stride() == (k, 1),
        "the right operand is column-major": right.stride() == (1, k),
        f"K and C are multiples of {MULTIPLE}": k % MULTIPLE == 0 and c % MULTIPLE == 0,
        "no size is zero": min(r, k, c) > 0,
        "scales are float32": left_scale.dtype == right_scale.dtype == torch.float32,
        f"scales have the shapes {expected[0]} and {expected[1]}": (tuple(left_scale.shape), tuple(right_scale.shape))
        == expected,
        "scales are contiguous": left_scale.is_contiguous() and right_scale.is_contiguous(),
        "the result is float32, bfloat16 or float16": out_dtype in _OUT,
        "with scales by row the result is bfloat16 and the right operand E4M3": not by_rows
        or (out_dtype == torch.bfloat16 and right.dtype == torch.float8_e4m3fn),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(
            f"torch._scaled_mm({left.dtype} {tuple(left.shape)} strides {left.stride()}, {right.dtype}"
            f" {tuple(right.shape)} strides {right.stride()}, scales {tuple(left_scale.shape)} and"
            f" {tuple(right_scale.shape)}, {out_dtype=}): on CUDA expected that {'; '.join(broken)}. Pad and transpose"
            " the operands first."
        )


def refusal(device: str, capability: tuple[int, int] | None, *, hip: bool, blocks: bool = False) -> str | None:
    """Return why a device cannot multiply float8 as the plugins need it, or None if it can.

    Args:
        device: "cuda", "cpu", ...
        capability: the compute capability of the CUDA device, such as (9, 0).
        hip: whether torch is built for ROCm.
        blocks: whether the Triton kernel for blockwise scales is needed instead of ``torch._scaled_mm``.
    """
    if device != "cuda" or capability is None:
        return f"the device is {device!r}, which has no float8 matrix units"
    if hip:
        return "ROCm uses other float8 formats (FNUZ), which are not supported"
    if capability < CAPABILITY:
        return (
            f"the device's compute capability is {capability[0]}.{capability[1]}, and float8 matrix units need 8.9"
            " (Ada) or 9.0 (Hopper)"
        )
    if blocks and capability < fp8_matmul.CAPABILITY:
        return (
            f"the device's compute capability is {capability[0]}.{capability[1]}, and the kernel for blockwise scales"
            " needs 9.0 (Hopper) or later"
        )
    return None
