"""Clipping of gradients among which some have a sparse layout, which torch's functions for it do not take."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def dense_views(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """``parameters``, and in the place of each whose gradient is sparse a tensor whose gradient is its values.

    Norms of values are norms of gradients, and what is done to the values in place is done to the gradient, which holds
    each row once from then on.
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
