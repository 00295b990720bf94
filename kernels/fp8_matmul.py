"""Products of float8 matrices whose scales change along the contraction (DeepSeek-V3, arXiv:2412.19437, section 3.3).

With codes ``a`` (M, K) and ``b`` (N, K), and inverse scales ``1 / s`` for each 128 of K, the product is

    y[m, n] = sum_i  1/s_a[m, i]  1/s_b[n, i]  sum_{k in block i} a[m, k] b[n, k].

The outer sum is in float32. The device's tensor cores compute the inner sum of at most 128 products, on Hopper with about 14
bits. DeepSeek-V3 (section 3.5.2) finds that 128 is the shortest sum that costs no time. For y = x W^T and dx = g W, ``a`` has
one scale per 1 x 128 and ``b`` one per 128 x 128. For dW = g^T x both have one per 1 x 128. Each of ``a`` and ``b`` can be
E4M3 or E5M2.

There are other implementations. ``torch._scaled_mm`` uses cuBLAS, on Hopper only and from CUDA 12.9 on (pytorch#158037), with
M padded to a multiple of 4. DeepGEMM compiles its own CUDA for Hopper and later. torchao has a prototype
(``blockwise_fp8_training``), and Transformer Engine has kernels too. Their authors tuned them, so measure those first.
benchmarks/README.md has the measured speed of this kernel. It needs only triton, accepts every size, and computes the
reference's numbers, which help to check the others.
"""

import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels.fp8_cast import BLOCK, MAX, Codes

CAPABILITY = (9, 0)
"""Least compute capability of NVIDIA devices for the kernel."""

OUT = (torch.float32, torch.bfloat16, torch.float16)


def matmul(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """Compute ``a b^T`` (see the module's docstring).

    If K is not a multiple of 16, the codes are copied and padded with zeros. Scales of groups that are stored by rows are
    copied. On CUDA the first call with new sizes times a few configurations, which give the same numbers.

    Args:
        a: (M, K), with one scale per 1 x 128 or per 128 x 128.
        b: (N, K), with the same choice of scales.
        dtype: type of the result. Types other than float32, bfloat16 and float16 are converted from float32.

    Returns:
        The product, (M, N).

    Raises:
        TypeError: if codes are not float8.
        ValueError: if sizes or scales do not fit, or the device has no such tensor cores.
        ImportError: if the tensors are on CUDA and triton is not installed.
    """
    check(a, b)
    if not _launch.uses_triton(a.codes):
        return reference_matmul(a, b, dtype)
    if a.codes.is_cuda and (found := torch.cuda.get_device_capability(a.codes.device)) < CAPABILITY:
        raise ValueError(
            f"matmul(a on a device of compute capability {found[0]}.{found[1]}): expected 9.0 (Hopper) or later for float8"
            " products with blockwise scales. Use reference_matmul, which is slow and runs on every device."
        )
    out = dtype if dtype in OUT else torch.float32
    y = torch.empty(a.codes.shape[0], b.codes.shape[0], dtype=out, device=a.codes.device)
    _launch.triton_module("fp8_matmul").matmul(a, b, y)
    return y.to(dtype)


def reference_matmul(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """Reference for :func:`matmul` with float32 sums, also used on a CPU.

    It multiplies codes and scales their sums. So the factors are exact in TF32 and bfloat16 too, which
    ``torch.set_float32_matmul_precision`` can enable.
    """
    of_a, of_b = a.by_row, b.by_row
    y = torch.zeros(a.codes.shape[0], b.codes.shape[0], device=a.codes.device)
    for i in range(of_a.shape[1]):
        along = slice(i * BLOCK, (i + 1) * BLOCK)
        part = a.codes[:, along].float() @ b.codes[:, along].float().t()
        y += part.mul_(of_a[:, i : i + 1]).mul_(of_b[:, i : i + 1].t())
    return y.to(dtype)


def check(a: Codes, b: Codes) -> None:
    """Raise if :func:`matmul` does not support these operands."""
    for name, m in (("a", a), ("b", b)):
        if m.codes.dtype not in MAX:
            raise TypeError(f"matmul({name} of {m.codes.dtype}): expected torch.float8_e4m3fn or torch.float8_e5m2.")
        if m.codes.ndim != 2 or m.codes.numel() == 0 or not m.codes.is_contiguous():
            raise ValueError(
                f"matmul({name} of shape {tuple(m.codes.shape)}, strides {m.codes.stride()}): expected a matrix that is"
                " contiguous and not empty."
            )
        rows, blocks = m.codes.shape[0], -(-m.codes.shape[1] // BLOCK)
        expected = ((rows, blocks), (-(-rows // BLOCK), blocks))
        if tuple(m.inverse.shape) not in expected or m.inverse.dtype != torch.float32:
            raise ValueError(
                f"matmul({name} with {m.inverse.dtype} scales of shape {tuple(m.inverse.shape)}): expected float32 of shape"
                f" {expected[0]}, for groups of 128, or {expected[1]}, for blocks of 128 x 128. Use fp8_cast.cast, which"
                " makes them."
            )
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(
            f"matmul(a of shape {tuple(a.codes.shape)}, b of shape {tuple(b.codes.shape)}): expected one length of the"
            " contraction, the last dimension of both."
        )
