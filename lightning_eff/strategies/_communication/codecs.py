"""Gradients as bytes: signs with a scale per row (Seide et al. 2014), bucketed QSGD (Alistarh et al. 2017; CGX), bfloat16."""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack small integers into bytes, the first in the lowest bits.

    Args:
        codes: uint8 of shape (..., n), each in [0, 2^bits).
        bits: 1, 2, 4 or 8.

    Returns:
        uint8 of shape (..., ceil(n * bits / 8)), padded with 0 in the last byte.
    """
    per_byte = 8 // bits
    padded = F.pad(codes, (0, -codes.shape[-1] % per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` codes that :func:`pack_codes` packed, uint8 of shape (..., count)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :count]


class Codec(ABC):
    """Encodes a stack of matrices as rows of bytes, whose length depends only on the shape, and decodes them."""

    @abstractmethod
    def num_bytes(self, rows: int, cols: int) -> int:
        """Return the number of bytes for a float32 matrix of shape (rows, cols)."""

    @abstractmethod
    def encode(self, x: Tensor, seed: int) -> Tensor:
        """Encode each of n matrices.

        Args:
            x: float32 of shape (n, rows, cols).
            seed: random seed, if needed. The same seed on the same device type gives the same bytes.

        Returns:
            uint8 of shape (n, num_bytes(rows, cols)).
        """

    @abstractmethod
    def decode(self, data: Tensor, rows: int, cols: int) -> Tensor:
        """Decode to float32 of shape (n, rows, cols). The result is the same on all devices."""


class SignCodec(Codec):
    """Sends one bit per element and one float per row: ``x[r, c] -> sign(x[r, c]) * scale[r]``.

    ``scale[r] = mean |x[r, c]|`` over the columns that are not all zero. A row or column of zeros (a token that the batch does
    not have, a dead unit) is decoded as zeros. Signs alone cannot represent zero, and would move such weights by a whole step.
    Other zeros count as positive, and error feedback corrects them. The codec is deterministic.
    """

    @override
    def num_bytes(self, rows: int, cols: int) -> int:
        return 4 * rows + math.ceil(cols / 8) + math.ceil(rows * cols / 8)

    @override
    def encode(self, x: Tensor, seed: int) -> Tensor:
        alive = (x != 0).any(dim=1)  # (n, cols)
        scale = x.abs().sum(dim=2) / alive.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.cat(
            [
                scale.view(torch.uint8),
                pack_codes(alive.to(torch.uint8), 1),
                pack_codes((x >= 0).flatten(1).to(torch.uint8), 1),
            ],
            dim=1,
        )

    @override
    def decode(self, data: Tensor, rows: int, cols: int) -> Tensor:
        scales, masks, signs = data.split([4 * rows, math.ceil(cols / 8), math.ceil(rows * cols / 8)], dim=1)
        scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        alive = unpack_codes(masks, 1, cols)
        sign = unpack_codes(signs, 1, rows * cols).view(-1, rows, cols).float().mul_(2).sub_(1)
        return sign.mul_(scale.unsqueeze(2)).mul_(alive.unsqueeze(1))


class BFloat16Codec(Codec):
    """Sends each element as the nearest bfloat16, with 8 significant bits. The codec is deterministic."""

    @override
    def num_bytes(self, rows: int, cols: int) -> int:
        return 2 * rows * cols

    @override
    def encode(self, x: Tensor, seed: int) -> Tensor:
        return x.flatten(1).to(torch.bfloat16).view(torch.uint8)

    @override
    def decode(self, data: Tensor, rows: int, cols: int) -> Tensor:
        values = data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        return values.float().view(-1, rows, cols)


class QuantizedCodec(Codec):
    """QSGD in buckets, as in CGX: ``x -> scale * k / s`` with an integer ``|k| <= s = 2^(bits-1) - 1``.

    ``scale`` is the largest ``|x|`` of the bucket. ``s |x| / scale`` is rounded up with the probability of its fraction, so
    that the expectation is ``x``. With 4 bits and buckets of 1024, the error of one rounding is a few percent of the energy.
    So error feedback contracts.

    Args:
        bits: bits per element, 2, 4 or 8.
        bucket_size: number of elements that share a scale, >= 1.
    """

    def __init__(self, bits: int, bucket_size: int) -> None:
        self.bits = bits
        self.bucket_size = bucket_size
        self.levels = 2 ** (bits - 1) - 1

    def _layout(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the number of elements per scale, and the number of scales, for a matrix of this shape."""
        size = min(self.bucket_size, rows * cols)
        return size, math.ceil(rows * cols / size)

    @override
    def num_bytes(self, rows: int, cols: int) -> int:
        return 4 * self._layout(rows, cols)[1] + math.ceil(rows * cols * self.bits / 8)

    @override
    def encode(self, x: Tensor, seed: int) -> Tensor:
        n, rows, cols = x.shape
        size, buckets = self._layout(rows, cols)
        flat = F.pad(x.flatten(1), (0, size * buckets - rows * cols)).view(n, buckets, size)
        scale = flat.abs().amax(dim=2)
        generator = torch.Generator(x.device).manual_seed(seed)
        uniform = torch.rand(flat.shape, generator=generator, device=x.device, dtype=torch.float32)
        # k = floor(s |x| / scale) + 1[u < fraction]
        y = flat.abs() * self.levels / torch.where(scale > 0, scale, 1.0).unsqueeze(2)
        k = y.floor()
        k = (k + (uniform < y - k)).clamp_(max=self.levels) * flat.sign()
        codes = (k + self.levels).nan_to_num_(0.0).to(torch.uint8).flatten(1)[:, : rows * cols]
        return torch.cat([scale.contiguous().view(torch.uint8), pack_codes(codes, self.bits)], dim=1)

    @override
    def decode(self, data: Tensor, rows: int, cols: int) -> Tensor:
        size, buckets = self._layout(rows, cols)
        scales, packed = data.split([4 * buckets, math.ceil(rows * cols * self.bits / 8)], dim=1)
        scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        k = unpack_codes(packed, self.bits, rows * cols).float() - self.levels
        flat = F.pad(k, (0, size * buckets - rows * cols)).view(-1, buckets, size)
        flat = flat * (scale / self.levels).unsqueeze(2)
        return flat.flatten(1)[:, : rows * cols].view(-1, rows, cols)
