"""Clip gradients if some have a sparse layout, which torch's functions do not support."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def dense_views(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield ``parameters``, replacing those with sparse gradients by tensors whose gradient is the sparse values.

    Norms of the values equal norms of the gradients. In-place changes of the values change the gradient, which is coalesced.
    """
    for p in parameters:
        if p.grad is None or p.grad.layout != torch.sparse_coo:
            yield p
            continue
        p.grad = p.grad.coalesce()
        values = p.grad.values()
        stand_in = torch.empty_like(values)
        stand_in.grad = values
        yield stand_in
