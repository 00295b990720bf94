"""Lists of tensors in chunks, so that temporaries have a bounded size and stay in a processor's cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_CACHED = 2**16  # elements per thread of a CPU: torch gives each thread as many, and they stay in its cache
_ELSEWHERE = 2**22  # on other devices: few kernel launches, and 16 MiB for each temporary of float32


def chunk_size(device: torch.device) -> int:
    """The number of elements of a chunk on this device."""
    return _CACHED * torch.get_num_threads() if device.type == "cpu" else _ELSEWHERE


def stretches(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield ranges of neighbours that have one device and dtype and fill one chunk at most, or are one larger tensor."""
    start, filled, kind = 0, 0, None
    limit = 0
    for i, t in enumerate(tensors):
        count = t.numel()
        if kind is None or filled + count > limit or kind != (t.device, t.dtype):
            if i:
                yield slice(start, i)
            start, filled, kind = i, 0, (t.device, t.dtype)
            limit = chunk_size(t.device)
        filled += count
    if tensors:
        yield slice(start, len(tensors))


def chunks(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield lists in chunks. Tensors at the same place of each list have the same shape.

    A chunk has several whole tensors, or a slice of one tensor that is larger than a chunk. Slices share memory with their
    tensor, so in-place operations reach it. A DTensor is never sliced.

    Args:
        lists: lists of the same length, for operations element by element.
    """
    for part in stretches(lists[0]):
        columns = [list(found[part]) for found in lists]
        yield from _slices(columns) if len(columns[0]) == 1 else (columns,)


def _slices(columns: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    row = [column[0] for column in columns]
    limit = chunk_size(row[0].device)
    if row[0].numel() <= limit or any(isinstance(t, DTensor) for t in row):
        yield columns
        return
    if all(t.is_contiguous() for t in row):
        row = [t.view(-1) for t in row]
    # other layouts, such as channels-last, are cut along their first dimension
    rows = max(1, limit * len(row[0]) // row[0].numel())
    for pieces in zip(*(t.split(rows) for t in row), strict=True):
        yield [[piece] for piece in pieces]


def local(tensors: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """This process's parts of DTensors, as their parameters are placed; other tensors as they are.

    A rule that treats each element alone may compute in these parts. What is written to a part that had to be moved is lost.

    Args:
        tensors: a tensor for each parameter.
        params: the parameters.
    """
    found = []
    for t, p in zip(tensors, params, strict=True):
        if isinstance(t, DTensor) and isinstance(p, DTensor):
            t = (t if t.placements == p.placements else t.redistribute(placements=p.placements)).to_local()
        found.append(t)
    return found
