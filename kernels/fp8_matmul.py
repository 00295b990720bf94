"""Products of float8 matrices whose scales change along the contraction (DeepSeek-V3, arXiv:2412.19437, section 3.3).

With codes ``a`` (M, K) and ``b`` (N, K) and inverse scales ``1 / s`` for each 128 of K,

    y[m, n] = sum_i  1/s_a[m, i]  1/s_b[n, i]  sum_{k in block i} a[m, k] b[n, k],

the outer sum in float32, and the inner one, of at most 128 products, as the device's tensor cores take it: on Hopper in
about 14 bits, by DeepSeek-V3's section 3.5.2, which finds 128 to be the shortest sum that costs no time. For y = x W^T and
dx = g W, ``a`` has a scale for each 1 x 128 and ``b`` one for each 128 x 128; for dW = g^T x both have them for each
1 x 128. ``a`` and ``b`` are E4M3 or E5M2, each by itself.

What else does this: ``torch._scaled_mm`` by cuBLAS, on Hopper alone and from CUDA 12.9 on (pytorch#158037), with M
padded to a multiple of 4; DeepGEMM, for Hopper and later, in CUDA that it compiles itself; torchao's prototype
(``blockwise_fp8_training``) and Transformer Engine. Those are tuned by their authors, and where one of them is at hand it
is the one to measure first. What the kernel here reaches is in benchmarks/README.md, where a GPU was at hand. It asks for
nothing but triton, takes every size, and gives the reference's numbers, on which the others can be checked.
"""

import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels.fp8_cast import BLOCK, MAX, Codes

CAPABILITY = (9, 0)
"""The first NVIDIA devices that the kernel is for."""

OUT = (torch.float32, torch.bfloat16, torch.float16)


def matmul(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """``a b^T`` (see the module's docstring).

    Args:
        a: (M, K), with a scale for each 1 x 128 or each 128 x 128.
        b: (N, K), likewise. Sizes are any; where K is no
            multiple of 16 codes are copied, with zeros beside them.
        dtype: of the result; other than float32, bfloat16 and float16 it is converted from float32.

    Returns:
        (M, N).

    Raises:
        TypeError: codes are not float8.
        ValueError: sizes or scales do not fit, or the device is one that has no such tensor cores.
        ImportError: on CUDA and triton not installed.
    """
    check(a, b)
    if not _launch.uses_triton(a.codes):
        return reference_matmul(a, b, dtype)
    if a.codes.is_cuda and (found := torch.cuda.get_device_capability(a.codes.device)) < CAPABILITY:
        raise ValueError(
            f"matmul(a on a device of compute capability {found[0]}.{found[1]}): expected 9.0 (Hopper) or later for float8"
            " products with scales by block. reference_matmul runs anywhere, slowly."
        )
    out = dtype if dtype in OUT else torch.float32
    y = torch.empty(a.codes.shape[0], b.codes.shape[0], dtype=out, device=a.codes.device)
    _launch.triton_module("fp8_matmul").matmul(a, b, y)
    return y.to(dtype)


def reference_matmul(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """What :func:`matmul` computes, with float32 sums throughout; also the way of a CPU.

    Codes are multiplied and their sums scaled, so that factors are exact in TF32 and bfloat16 too, whatever
    ``torch.set_float32_matmul_precision`` allows.
    """
    of_a, of_b = a.by_row, b.by_row
    y = torch.zeros(a.codes.shape[0], b.codes.shape[0], device=a.codes.device)
    for i in range(of_a.shape[1]):
        along = slice(i * BLOCK, (i + 1) * BLOCK)
        part = a.codes[:, along].float() @ b.codes[:, along].float().t()
        y += part.mul_(of_a[:, i : i + 1]).mul_(of_b[:, i : i + 1].t())
    return y.to(dtype)


def check(a: Codes, b: Codes) -> None:
    """Raise if :func:`matmul` cannot take these operands."""
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
        if tuple(m.inverse.shape) not in expected or m.inverse.dtype != torch.float32 or not m.inverse.is_contiguous():
            raise ValueError(
                f"matmul({name} with {m.inverse.dtype} scales of shape {tuple(m.inverse.shape)}): expected contiguous"
                f" float32 of shape {expected[0]}, for groups of 128, or {expected[1]}, for blocks of 128 x 128."
            )
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(
            f"matmul(a of shape {tuple(a.codes.shape)}, b of shape {tuple(b.codes.shape)}): expected one length of the"
            " contraction, the last dimension of both."
        )
