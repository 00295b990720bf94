"""Random projections whose rows are orthogonal, by blocks of as many as there are features."""

import torch
from torch import Generator, Tensor


def orthogonal_rows(rows: int, width: int, generator: Generator, *, gaussian: bool = False) -> Tensor:
    """(rows, width): blocks of up to ``width`` orthogonal rows, each block drawn anew; float32, on the CPU.

    Args:
        rows: how many.
        width: features.
        generator: of what is drawn.
        gaussian: rows are as long as normal vectors are, so that each is one by itself; else of length 1.
    """
    blocks: list[Tensor] = []
    for start in range(0, rows, width):
        drawn = torch.randn(width, width, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(drawn)
        blocks.append((q * r.diagonal().sign()).T[: rows - start])  # even over all directions
    found = torch.cat(blocks)
    if gaussian:
        found = found * torch.randn(rows, width, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return found.float()
