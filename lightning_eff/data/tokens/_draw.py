"""Random choice of tokens."""

import torch
from torch import Generator, Tensor


def draw(full: int, count: int, generator: Generator, *, always: int = 0, rows: int = 1) -> Tensor:
    """Draw ``count`` of the places 0 .. ``full`` - 1 in each of ``rows``, uniformly; return them in order, (rows, count).

    The first ``always`` places are always included.
    """
    numbers = torch.rand(rows, full - always, generator=generator, dtype=torch.float32)
    drawn = numbers.topk(count - always, dim=1).indices.sort(dim=1).values + always
    return torch.cat([torch.arange(always).expand(rows, -1), drawn], dim=1)
