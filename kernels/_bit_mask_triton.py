"""Triton kernels to pack and unpack one-bit masks, and tensors with two values, each with one read and one write.

A byte's elements are ``length = num // 8`` apart, so a program loads eight runs of consecutive elements. Masks whose eight
runs are aligned are read as words of four bytes: one shift moves the bits of four elements. All programs but those of a second
launch work on whole tiles, and need no mask.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

BLOCK = 1024  # bytes or words of packed mask for each program
WORDS = 512  # 16 bytes at once for each thread of 4 warps
NUM_WARPS = 4
ALIGNED = 128  # elements: eight runs of a multiple of 16 bytes


@triton.jit
def run_index(at, k, length):
    """Return the indices of the k-th elements of bytes ``at``; the last byte has the elements from 8 ``length`` on."""
    return tl.where(at < length, k * length + at, 8 * length + k)


@triton.jit(do_not_specialize=["num", "first"])
def pack_kernel(mask, out, num, length, first, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Pack ``mask`` (num,), bytes 0 and 1, into ``out`` (ceil(num / 8),). Both may be words of four bytes."""
    at = (tl.program_id(0) + first).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(8):
        if EVEN:
            bit = tl.load(mask + k * length.to(tl.int64) + at)
        else:
            index = run_index(at, k, length)
            bit = tl.load(mask + index, mask=(at <= length) & (index < num), other=0)
        packed |= bit.to(tl.int32) << k
    packed = packed.to(out.dtype.element_ty)
    if EVEN:
        tl.store(out + at, packed)
    else:
        tl.store(out + at, packed, mask=at * 8 < num)


@triton.jit(do_not_specialize=["num", "first"])
def unpack_kernel(packed, out, num, length, first, WIDE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """The inverse of ``pack_kernel``; WIDE says that both are words of four bytes."""
    ONES: tl.constexpr = 0x01010101 if WIDE else 1
    at = (tl.program_id(0) + first).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = (tl.load(packed + at) if EVEN else tl.load(packed + at, mask=at * 8 < num, other=0)).to(tl.int32)
    for k in tl.static_range(8):
        bit = ((value >> k) & ONES).to(out.dtype.element_ty)
        if EVEN:
            tl.store(out + k * length.to(tl.int64) + at, bit)
        else:
            index = run_index(at, k, length)
            tl.store(out + index, bit, mask=(at <= length) & (index < num))


@triton.jit(do_not_specialize=["num", "first"])
def pack_pair_kernel(x, low, high, out, other, num, length, first, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Pack ``x == high`` into ``out``; set ``other`` (1,) to 1 if an element of ``x`` is neither ``low`` nor ``high``."""
    at = (tl.program_id(0) + first).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lesser, greater = tl.load(low), tl.load(high)
    packed = tl.zeros((BLOCK,), tl.int32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(8):
        if EVEN:
            value = tl.load(x + k * length.to(tl.int64) + at)
            inside = True
        else:
            index = run_index(at, k, length)
            inside = (at <= length) & (index < num)
            value = tl.load(x + index, mask=inside, other=0.0)
        above = value == greater
        packed |= (above & inside).to(tl.int32) << k
        strange |= (((above | (value == lesser)) == 0) & inside).to(tl.int32)
    if EVEN:
        tl.store(out + at, packed.to(tl.uint8))
    else:
        tl.store(out + at, packed.to(tl.uint8), mask=at * 8 < num)
    if tl.max(strange, axis=0) > 0:
        tl.store(other, 1)


@triton.jit(do_not_specialize=["num", "first"])
def unpack_pair_kernel(packed, low, high, out, num, length, first, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """The inverse of ``pack_pair_kernel``."""
    at = (tl.program_id(0) + first).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lesser, greater = tl.load(low), tl.load(high)
    byte = (tl.load(packed + at) if EVEN else tl.load(packed + at, mask=at * 8 < num, other=0)).to(tl.int32)
    for k in tl.static_range(8):
        value = tl.where(((byte >> k) & 1) == 1, greater, lesser)
        if EVEN:
            tl.store(out + k * length.to(tl.int64) + at, value)
        else:
            index = run_index(at, k, length)
            tl.store(out + index, value, mask=(at <= length) & (index < num))


def over_bytes(kernel: Any, tensors: tuple[Tensor, ...], num: int, block: int, **constants: Any) -> None:
    """Launch ``kernel(*tensors, num, length, first)`` over the bytes, or words, of ``num`` elements; whole tiles first."""
    length = num // 8
    whole, size = length // block, -(-num // 8)
    with _launch.current(tensors[0].device):
        for first, programs, even in ((0, whole, True), (whole, triton.cdiv(size, block) - whole, False)):
            if programs:
                grid = (programs,)
                kernel[grid](*tensors, num, length, first, BLOCK=block, EVEN=even, num_warps=NUM_WARPS, **constants)


def words(*tensors: Tensor, num: int) -> tuple[Tensor, ...] | None:
    """Return bytes as words of four, if each eighth of ``num`` elements is a multiple of 16 bytes, and starts at one."""
    if num % ALIGNED or any(t.data_ptr() % 16 for t in tensors):
        return None
    return tuple(t.view(torch.int32) for t in tensors)


def pack(mask: Tensor, out: Tensor, *, block: int | None = None) -> None:
    """Pack ``mask``, contiguous uint8 (num,), into ``out``, uint8 (ceil(num / 8),)."""
    wide = words(mask, out, num=mask.numel())
    if wide:
        over_bytes(pack_kernel, wide, mask.numel() // 4, block or WORDS)
    else:
        over_bytes(pack_kernel, (mask, out), mask.numel(), block or BLOCK)


def unpack(packed: Tensor, out: Tensor, *, block: int | None = None) -> None:
    """The inverse of :func:`pack`."""
    wide = words(packed, out, num=out.numel())
    if wide:
        over_bytes(unpack_kernel, wide, out.numel() // 4, block or WORDS, WIDE=True)
    else:
        over_bytes(unpack_kernel, (packed, out), out.numel(), block or BLOCK, WIDE=False)


def pack_pair(x: Tensor, low: Tensor, high: Tensor, out: Tensor, *, block: int = BLOCK) -> Tensor:
    """Pack ``x == high`` of a contiguous ``x`` (num,) into ``out``, uint8 (ceil(num / 8),).

    Returns:
        int32 of shape (1,), 1 if an element of ``x`` is neither ``low`` nor ``high``, else 0.
    """
    other = torch.zeros(1, dtype=torch.int32, device=x.device)
    over_bytes(pack_pair_kernel, (x, low, high, out, other), x.numel(), block)
    return other


def unpack_pair(packed: Tensor, low: Tensor, high: Tensor, out: Tensor, *, block: int = BLOCK) -> None:
    """Write ``high`` or ``low`` to each element of a contiguous ``out`` (num,)."""
    over_bytes(unpack_pair_kernel, (packed, low, high, out), out.numel(), block)
