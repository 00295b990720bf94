"""Masks in one bit for each element: boolean ones, and float tensors that hold two values, such as dropout masks.

With ``L = num_elements // 8``, byte ``b < L`` holds elements ``b, b + L, ..., b + 7 L``, the first in the lowest bit, so
that packing moves nothing between vector lanes; the up to 7 elements that remain share one byte more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_eff.kernels import _launch

SAMPLE = 1024  # elements looked at first: most tensors have more than two values, and show it here
PIECE = 262_144  # elements compared at a time on a CPU, so that buffers stay in its cache


@dataclass(frozen=True, slots=True)
class PackedPair:
    """A float tensor of two values, in compressed form.

    Attributes:
        codes: uint8 of shape (ceil(num_elements / 8),), as :func:`pack_mask` makes them: where the value is ``high``.
        low: the lesser value, of shape (1,), of the tensor's dtype.
        high: the greater value, likewise; equal to ``low`` if the tensor holds one value alone.
        shape: of the tensor.
    """

    codes: Tensor
    low: Tensor
    high: Tensor
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and the two values."""
        return self.codes.numel() + 2 * self.low.element_size()


def pack_mask(mask: Tensor) -> Tensor:
    """The bytes of a boolean tensor of any shape and strides, uint8 of shape (ceil(num_elements / 8),).

    Raises:
        TypeError: ``mask`` is not boolean.
        ImportError: ``mask`` on CUDA and triton not installed.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"pack_mask(mask of {mask.dtype}): expected torch.bool; for two float values use pack_pair.")
    flat = mask.contiguous().view(-1).view(torch.uint8)
    out = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=mask.device)
    if _launch.uses_triton(out):
        _launch.triton_module("bit_mask").pack(flat, out)
        return out
    length, rest = divmod(flat.numel(), 8)
    # sum_k 2^k m_k, as pairs of bits, then of nibbles, then of bytes: vectorised, where a sum over eight is not
    bits = flat[: 8 * length].view(2, 2, 2, length)
    pairs = torch.add(bits[:, :, 0], bits[:, :, 1], alpha=2)
    nibbles = torch.add(pairs[:, 0], pairs[:, 1], alpha=4)
    torch.add(nibbles[0], nibbles[1], alpha=16, out=out[:length])
    if rest:
        out[length] = (flat[8 * length :] << torch.arange(rest, dtype=torch.uint8, device=out.device)).sum()
    return out


def unpack_mask(packed: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The boolean tensor of ``shape`` whose :func:`pack_mask` is ``packed``; contiguous.

    Raises:
        ValueError: ``packed`` has another number of bytes than ``shape`` needs.
        ImportError: ``packed`` on CUDA and triton not installed.
    """
    num = torch.Size(shape).numel()
    if packed.numel() != -(-num // 8):
        raise ValueError(
            f"unpack_mask: got {packed.numel()} bytes for a mask of shape {tuple(shape)}; expected {-(-num // 8)}, one"
            " for each 8 elements."
        )
    out = torch.empty(num, dtype=torch.uint8, device=packed.device)
    if _launch.uses_triton(out):
        _launch.triton_module("bit_mask").unpack(packed, out)
        return out.view(torch.bool).view(shape)
    length, rest = divmod(num, 8)
    whole, bits = packed[:length], out[: 8 * length].view(8, length)
    for k in range(8):
        torch.bitwise_right_shift(whole, k, out=bits[k])
    bits.bitwise_and_(1)
    if rest:
        out[8 * length :] = (packed[length] >> torch.arange(rest, dtype=torch.uint8, device=out.device)) & 1
    return out.view(torch.bool).view(shape)


def reference_pack_mask(mask: Tensor) -> Tensor:
    """What :func:`pack_mask` computes, one element after another."""
    flat = mask.flatten().tolist()
    length = len(flat) // 8
    out = [0] * -(-len(flat) // 8)
    for i, bit in enumerate(flat):
        byte, k = (i % length, i // length) if i < 8 * length else (length, i - 8 * length)
        out[byte] |= int(bit) << k
    return torch.tensor(out, dtype=torch.uint8, device=mask.device)


def pack_pair(x: Tensor) -> PackedPair | None:
    """Compress a float tensor that holds at most two different values, exactly; None if it holds more, or a NaN.

    The first elements are looked at before the rest, so that the answer for other tensors comes soon; on CUDA it still
    makes the host wait for the device. ``-0.0`` counts as 0.0.

    Args:
        x: floating point, of any shape and strides; at least one element.

    Raises:
        ValueError: ``x`` is empty.
        ImportError: ``x`` on CUDA and triton not installed.
    """
    if not x.numel():
        raise ValueError(f"pack_pair(x of shape {tuple(x.shape)}): expected at least one element.")
    flat = x.detach().contiguous().view(-1)
    for part in (flat[:SAMPLE], flat):
        low, high = part.amin(), part.amax()
        above = _above(part, low, high)
        if above is None:
            return None
    return PackedPair(pack_mask(above), low.view(1), high.view(1), x.shape)


def _above(x: Tensor, low: Tensor, high: Tensor) -> Tensor | None:
    """``x == high``, or None if an element of ``x`` equals neither ``low`` nor ``high``."""
    if _launch.uses_triton(x):
        above = x == high
        return above if bool((above | (x == low)).all()) else None
    # A comparison into booleans is not vectorised on CPUs, a comparison into floats is: 1.0 and 0.2 ns for each element
    above = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    equal, either = torch.empty_like(x[:PIECE]), torch.empty_like(above[:PIECE])
    for part, out in zip(x.split(PIECE), above.split(PIECE), strict=True):
        buffer, other = equal[: len(part)], either[: len(part)]
        out.copy_(torch.eq(part, high, out=buffer))
        other.copy_(torch.eq(part, low, out=buffer)).bitwise_or_(out)
        if not other.amin():
            return None
    return above.view(torch.bool)


def unpack_pair(packed: PackedPair) -> Tensor:
    """The tensor that ``packed`` stands for, contiguous."""
    mask = unpack_mask(packed.codes, packed.shape)
    if not _launch.uses_triton(mask) and not packed.low and packed.high.isfinite():  # a dropout mask: 0 and 1 / (1 - p)
        return mask.view(torch.uint8).to(packed.high.dtype).mul_(packed.high)
    return torch.where(mask, packed.high, packed.low)
