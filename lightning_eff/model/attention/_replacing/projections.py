"""Random projections with orthogonal rows, in blocks of as many rows as there are features."""

import torch
from torch import Generator, Tensor


def orthogonal_rows(rows: int, width: int, generator: Generator, *, gaussian: bool = False) -> Tensor:
    """Return (rows, width): independent blocks of up to ``width`` orthogonal rows; float32, on the CPU.

    Args:
        rows: the number of rows.
        width: the number of features.
        generator: the random generator.
        gaussian: whether rows have the lengths of normal vectors, so that each row by itself is one; else length 1.
    """
    blocks: list[Tensor] = []
    for start in range(0, rows, width):
        drawn = torch.randn(width, width, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(drawn)
        blocks.append((q * r.diagonal().sign()).T[: rows - start])  # uniform over all directions
    found = torch.cat(blocks)
    if gaussian:
        found = found * torch.randn(rows, width, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return found.float()
