"""Triton kernels to pack and unpack one-bit masks, each with one read and one write."""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

BLOCK = 1024  # bytes of packed mask for each program: 64 elements for each thread of 4 warps
NUM_WARPS = 4


@triton.jit
def element_index(byte, num):
    """Return the indices of each byte's eight elements, shape (8, BLOCK); padding has indices from ``num`` on."""
    k = tl.arange(0, 8)[:, None]
    length = num // 8
    index = tl.where(byte[None, :] < length, k * length + byte[None, :], 8 * length + k)
    return tl.where(byte[None, :] <= length, index, num)


@triton.jit(do_not_specialize=["num"])
def pack_kernel(mask, out, num, BLOCK: tl.constexpr):
    """Pack ``mask`` (num,), bytes 0 and 1, into ``out`` (ceil(num / 8),)."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = element_index(byte, num)
    bit = tl.load(mask + index, mask=index < num, other=0).to(tl.int32)
    packed = tl.sum(bit << tl.arange(0, 8)[:, None], axis=0)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte * 8 < num)


@triton.jit(do_not_specialize=["num"])
def unpack_kernel(packed, out, num, BLOCK: tl.constexpr):
    """The inverse of ``pack_kernel``."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = element_index(byte, num)
    value = tl.load(packed + byte, mask=byte * 8 < num, other=0).to(tl.int32)
    bit = (value[None, :] >> tl.arange(0, 8)[:, None]) & 1
    tl.store(out + index, bit.to(tl.uint8), mask=index < num)


def pack(mask: Tensor, out: Tensor, *, block: int = BLOCK) -> None:
    """Pack ``mask``, contiguous uint8 (num,), into ``out``, uint8 (ceil(num / 8),)."""
    if out.numel():
        with _launch.current(out.device):
            pack_kernel[(triton.cdiv(out.numel(), block),)](mask, out, mask.numel(), BLOCK=block, num_warps=NUM_WARPS)


def unpack(packed: Tensor, out: Tensor, *, block: int = BLOCK) -> None:
    """The inverse of :func:`pack`."""
    if out.numel():
        with _launch.current(out.device):
            grid = (triton.cdiv(packed.numel(), block),)
            unpack_kernel[grid](packed, out, out.numel(), BLOCK=block, num_warps=NUM_WARPS)
