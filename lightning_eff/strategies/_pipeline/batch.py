"""Micro-batches of any batch, and what tells batches apart: their shapes, and a sum over their content."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_eff._core.batches import num_samples, select, tensors

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def split(batch: Any, number: int) -> list[Any]:
    """The batch in ``number`` equal parts, in order.

    Tensors and arrays whose dimension 0 counts the batch's samples are split, and so are lists and tuples of one item
    for each sample; dicts, named tuples, dataclasses and Hugging Face's ``BatchEncoding`` keep their make; all else is
    handed to every part.

    Args:
        batch: with ``num_samples(batch)`` a multiple of ``number``.
    """
    size = num_samples(batch)
    if number == 1:
        return [batch]
    part = size // number
    return [select(batch, torch.arange(i * part, (i + 1) * part), size) for i in range(number)]


def signature(batch: Any) -> Signature:
    """Path, shape and type of every tensor: batches with the same need the same buffers."""
    return tuple((path, tuple(t.shape), str(t.dtype)) for path, t in tensors(batch))


def digest(*parts: Any) -> int:
    """A number below 2**62 that follows from the parts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 2


def content(batch: Any) -> int:
    """A number that follows from what the batch holds, the same in every process."""
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
            f"{who}: the ranks of one pipeline got batches of different {what}; expected the same batch on each, since the"
            " first stage reads its inputs and the last its labels. Let the sampler depend on the data-parallel rank only"
            " (use_distributed_sampler=True), and seed what is random in it equally: seed_everything(..., workers=True)."
        )


def _checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    raw = flat.contiguous().view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, raw.numel() + 1, device=raw.device, dtype=torch.int64) % 65521
    return (raw * weights).sum()
