"""Random matrices with orthonormal rows or columns."""

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonal(shape: Sequence[int], *, gain: float, generator: torch.Generator) -> Tensor:
    """Return a random W of ``shape`` (m, ...), as a matrix (m, n): ``W^T W = gain^2 I`` if m >= n, else
    ``W W^T = gain^2 I``.

    It is uniform over such matrices: Q of a Gaussian matrix's QR decomposition, with a positive diagonal of R. Float32,
    on the CPU.
    """
    m, n = shape[0], max(torch.Size(shape[1:]).numel(), 1)
    a = torch.randn(max(m, n), min(m, n), generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(a)
    q = q * r.diagonal().sign()
    return (gain * (q if m >= n else q.mT)).reshape(*shape).float()
