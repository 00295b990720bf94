"""Masks with one bit per element: boolean tensors, and float tensors with two values, such as dropout masks.

With ``L = num_elements // 8``, byte ``b < L`` holds elements ``b, b + L, ..., b + 7 L``, the first in the lowest bit. So
packing moves nothing between vector lanes. The remaining elements, up to 7, share one more byte.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_eff.kernels import _launch

SAMPLE = 1024  # elements to check first; most tensors have more than two values among these
PIECE = 262_144  # elements compared at a time on a CPU, so that buffers stay in its cache


@dataclass(frozen=True, slots=True)
class PackedPair:
    """A compressed float tensor with two values.

    Attributes:
        codes: the packed mask of ``high`` values, uint8 of shape (ceil(num_elements / 8),).
        low: the lesser value, shape (1,), in the tensor's dtype.
        high: the greater value, equal to ``low`` if the tensor has only one.
        shape: shape of the tensor.
    """

    codes: Tensor
    low: Tensor
    high: Tensor
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """The bytes of the codes and the two values."""
        return self.codes.numel() + 2 * self.low.element_size()


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean tensor of any shape and strides into uint8 of shape (ceil(num_elements / 8),).

    Raises:
        TypeError: if ``mask`` is not boolean.
        ImportError: if ``mask`` is on CUDA and triton is not installed.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"pack_mask(mask of {mask.dtype}): expected torch.bool. For two float values use pack_pair.")
    flat = mask.contiguous().view(-1).view(torch.uint8)
    out = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=mask.device)
    if _launch.uses_triton(out):
        _launch.triton_module("bit_mask").pack(flat, out)
        return out
    length, rest = divmod(flat.numel(), 8)
    # sum_k 2^k m_k, by joining bits, then pairs, then nibbles; torch vectorises this, but not a sum over eight
    bits = flat[: 8 * length].view(2, 2, 2, length)
    pairs = torch.add(bits[:, :, 0], bits[:, :, 1], alpha=2)
    nibbles = torch.add(pairs[:, 0], pairs[:, 1], alpha=4)
    torch.add(nibbles[0], nibbles[1], alpha=16, out=out[:length])
    if rest:
        out[length] = (flat[8 * length :] << torch.arange(rest, dtype=torch.uint8, device=out.device)).sum()
    return out


def unpack_mask(packed: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the contiguous boolean tensor of ``shape`` that :func:`pack_mask` packs into ``packed``.

    Raises:
        ValueError: if ``packed`` does not have the number of bytes for ``shape``.
        ImportError: if ``packed`` is on CUDA and triton is not installed.
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
    """Reference for :func:`pack_mask`, one element after another."""
    flat = mask.flatten().tolist()
    length = len(flat) // 8
    out = [0] * -(-len(flat) // 8)
    for i, bit in enumerate(flat):
        byte, k = (i % length, i // length) if i < 8 * length else (length, i - 8 * length)
        out[byte] |= int(bit) << k
    return torch.tensor(out, dtype=torch.uint8, device=mask.device)


def pack_pair(x: Tensor) -> PackedPair | None:
    """Compress a float tensor with at most two values exactly; return None if it has more values or a NaN.

    The function checks a few elements first, so that it returns quickly for other tensors. On CUDA the host still waits for
    the device. ``-0.0`` counts as 0.0.

    Args:
        x: floating point, with any shape and strides and at least one element.

    Raises:
        ValueError: if ``x`` is empty.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    if not x.numel():
        raise ValueError(f"pack_pair(x of shape {tuple(x.shape)}): expected at least one element.")
    flat = x.detach().contiguous().view(-1)
    sample = flat[:SAMPLE]
    low, high = sample.amin(), sample.amax()
    if not _launch.uses_triton(x):
        if _above(sample, low, high) is None:
            return None
        low, high = flat.amin(), flat.amax()
        above = _above(flat, low, high)
        return None if above is None else PackedPair(pack_mask(above), low.view(1), high.view(1), x.shape)
    if not bool(((sample == high) | (sample == low)).all()):
        return None
    kernels = _launch.triton_module("bit_mask")
    codes = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=x.device)
    if bool(kernels.pack_pair(flat, low, high, codes)):
        # the sample may have had only one of two values
        if bool(low != high):
            return None
        low, high = flat.amin(), flat.amax()
        if bool(kernels.pack_pair(flat, low, high, codes)):
            return None
    return PackedPair(codes, low.view(1), high.view(1), x.shape)


def _above(x: Tensor, low: Tensor, high: Tensor) -> Tensor | None:
    """Return ``x == high``, or None if an element of ``x`` equals neither ``low`` nor ``high``."""
    # on CPUs torch vectorises a comparison into floats (0.2 ns per element), but not into booleans (1.0 ns)
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
    """Decompress to a contiguous tensor."""
    if _launch.uses_triton(packed.codes):
        out = torch.empty(packed.shape, dtype=packed.high.dtype, device=packed.codes.device)
        _launch.triton_module("bit_mask").unpack_pair(packed.codes, packed.low, packed.high, out.view(-1))
        return out
    mask = unpack_mask(packed.codes, packed.shape)
    if not packed.low and packed.high.isfinite():  # a dropout mask: 0 and 1 / (1 - p)
        return mask.view(torch.uint8).to(packed.high.dtype).mul_(packed.high)
    return torch.where(mask, packed.high, packed.low)
