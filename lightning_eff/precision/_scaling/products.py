"""Products of float8 matrices: emulated, by a Triton kernel, or by ``torch._scaled_mm`` under CUDA's rules.

CPU's ``_scaled_mm`` takes shapes, layouts and types that CUDA's refuses, so the rules are written down here
(aten/src/ATen/native/cuda/ScaledBlas.cpp of PyTorch 2.11 to 2.13) and what is handed to CUDA is brought to obey them.
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
CAPABILITY = (8, 9)  # of the first NVIDIA devices that multiply float8
_multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] -- no public name has this signature
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT = (torch.float32, torch.bfloat16, torch.float16)


def emulated(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """The product in float32; ``fast`` changes nothing.

    Codes are multiplied and the sum is scaled, block by block of the contraction where scales are, so that factors are
    exact in TF32 and bfloat16 too, whatever ``torch.set_float32_matmul_precision`` allows.
    """
    of_a, of_b = a.by_row, b.by_row
    if of_a.ndim == 0 or of_a.shape[1] == 1:
        y = a.codes.float() @ b.codes.float().t()
        return y.mul_(of_a).mul_(of_b.t()).to(dtype)
    return fp8_matmul.reference_matmul(a, b, dtype)


def by_blocks(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """The product of operands with scales by block, by :func:`.fp8_matmul.matmul`; ``fast`` changes nothing."""
    return fp8_matmul.matmul(a, b, dtype)


def scaled_mm(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """The product by CPU's ``torch._scaled_mm``, with one scale for each operand or one for each row."""
    scales = (a.inverse, b.inverse.t()) if a.inverse.ndim else (a.inverse, b.inverse)
    out = dtype if dtype in _OUT else torch.float32
    return _multiply(a.codes, b.codes.t(), *scales, out_dtype=out, use_fast_accum=fast).to(dtype)


def scaled_mm_on_cuda(a: Codes, b: Codes, dtype: torch.dtype, fast: bool, *, exact_by_rows: bool) -> Tensor:
    """The product by CUDA's ``torch._scaled_mm``, as :func:`for_cuda` brings it there.

    Args:
        a: (R, K), with one scale or one for each row.
        b: (C, K), likewise.
        dtype: of the result.
        fast: let CUDA accumulate in fewer bits than float32's.
        exact_by_rows: there is a good kernel for scales by row without fast accumulation; else the product is taken
            without scales, in float32, and scaled afterwards, as torchao does (``addmm_float8_unwrapped`` in 0.18).
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
    """``torch._scaled_mm`` for a device.

    Hopper's cuBLAS takes scales by row from CUDA 12.9 on; elsewhere CUTLASS does, which is slow without fast accumulation.
    """
    if device.type != "cuda":
        return scaled_mm
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    by_cublas = torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)
    return functools.partial(scaled_mm_on_cuda, exact_by_rows=by_cublas)


class Call(NamedTuple):
    """What CUDA's ``_scaled_mm`` is called with.

    Attributes:
        left: float8, (R, K).
        right: float8, (K, C).
        left_scale: float32, () or (R, 1): inverse scales.
        right_scale: float32, () or (1, C).
        out_dtype: of the result.
    """

    left: Tensor
    right: Tensor
    left_scale: Tensor
    right_scale: Tensor
    out_dtype: torch.dtype


def for_cuda(a: Codes, b: Codes, dtype: torch.dtype) -> Call:
    """``a b^T`` as CUDA takes it: K and C padded with zeros to multiples of 16, and with scales by row in bfloat16.

    The first C columns of the result are the product. Zeros are exact: they add nothing.
    """
    k, c = -a.codes.shape[1] % MULTIPLE, -b.codes.shape[0] % MULTIPLE
    left, right, right_scale = a.codes, b.codes, b.inverse
    if k:
        left = _padded(left, k, 0)
    if k or c:
        right = _padded(right, k, c)
    out = dtype if dtype in _OUT else torch.float32
    if a.inverse.ndim == 0:
        return Call(left, right.t(), a.inverse, right_scale, out)
    right_scale = torch.nn.functional.pad(right_scale.t(), (0, c), value=1.0)
    return Call(left, right.t(), a.inverse, right_scale.contiguous(), torch.bfloat16)


def _padded(codes: Tensor, columns: int, rows: int) -> Tensor:
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows))  # the byte 0 is zero
    return padded.view(codes.dtype)


def check_for_cuda(call: Call) -> None:
    """CUDA's rules for ``torch._scaled_mm`` with one scale for each operand, or one for each row and column.

    Only shapes, strides and dtypes are looked at, so that it can be tried on tensors of any device.

    Raises:
        ValueError: if one is broken, saying which.
    """
    left, right, left_scale, right_scale, out_dtype = call
    (r, k), (k2, c) = left.shape, right.shape
    by_rows = left_scale.numel() != 1 or left_scale.ndim == 2
    expected = ((r, 1), (1, c)) if by_rows else ((), ())
    rules = {
        "the contraction of both operands has one length": k == k2,
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
            " the operands before."
        )


def refusal(device: str, capability: tuple[int, int] | None, *, hip: bool, blocks: bool = False) -> str | None:
    """Why a device does not multiply float8 as the plugins need it; None if it does.

    Args:
        device: "cuda", "cpu", ...
        capability: of the CUDA device, such as (9, 0).
        hip: torch is built for ROCm.
        blocks: by the Triton kernel for scales by block, and not by ``torch._scaled_mm``.
    """
    if device != "cuda" or capability is None:
        return f"the device is {device!r}, which has no float8 matrix units"
    if hip:
        return "on ROCm float8 has other formats (FNUZ) and rules, which are not supported"
    if capability < CAPABILITY:
        return (
            f"the device's compute capability is {capability[0]}.{capability[1]}, and float8 matrix units come with 8.9"
            " (Ada) and 9.0 (Hopper)"
        )
    if blocks and capability < fp8_matmul.CAPABILITY:
        return (
            f"the device's compute capability is {capability[0]}.{capability[1]}, and the kernel for scales by block is for"
            " 9.0 (Hopper) and later"
        )
    return None
