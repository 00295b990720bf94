"""Splits batches into micro-batches, and compares batches by shapes and by a checksum of their content."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_eff._core.batches import num_samples, select, tensors

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def split(batch: Any, number: int) -> list[Any]:
    """Split the batch into ``number`` equal parts, in order.

    Tensors and arrays with the samples in dimension 0 are split, and so are lists and tuples with one item per sample.
    Dicts, named tuples, dataclasses and Hugging Face's ``BatchEncoding`` keep their type. Every part gets all other values.

    Args:
        batch: the batch. ``num_samples(batch)`` must be a multiple of ``number``.
        number: the number of parts.
    """
    size = num_samples(batch)
    if number == 1:
        return [batch]
    part = size // number
    return [select(batch, torch.arange(i * part, (i + 1) * part), size) for i in range(number)]


def signature(batch: Any) -> Signature:
    """Return path, shape and type of every tensor; batches with equal signatures need the same buffers."""
    return tuple((path, tuple(t.shape), str(t.dtype)) for path, t in tensors(batch))


def digest(*parts: Any) -> int:
    """Return a hash of the parts below 2**62, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 2


def content(batch: Any) -> int:
    """Return a hash of the batch's content, the same in every process."""
    sums = [_checksum(tensor) for _, tensor in tensors(batch)]
    return digest(*torch.stack(sums).tolist()) if sums else digest()


def check_same(batch: Any, group: ProcessGroup, device: torch.device, *, inside: bool, who: str) -> None:
    """Raise ``ValueError`` on all of ``group`` if its ranks' batches differ in shape or, if ``inside``, in content."""
    shapes, held = digest(signature(batch)), content(batch) if inside else 0
    mine = torch.tensor([shapes, -shapes, held, -held], dtype=torch.int64, device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    high, low, most, least = mine.tolist()
    if high != -low or most != -least:
        what = "shapes" if high != -low else "content"
        raise ValueError(
            f"{who}: the ranks of one pipeline got batches of different {what}, but the first stage reads the inputs and the"
            " last the labels of one batch. Let the sampler depend only on the data-parallel rank"
            " (use_distributed_sampler=True), and call seed_everything(..., workers=True)."
        )


def _checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    raw = flat.contiguous().view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, raw.numel() + 1, device=raw.device, dtype=torch.int64) % 65521
    return (raw * weights).sum()
