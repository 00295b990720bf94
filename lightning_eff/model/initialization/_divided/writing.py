"""One whole weight at a time, to be changed in place, also if it is divided over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@contextmanager
def whole(parameter: Tensor) -> Iterator[Tensor]:
    """Give the whole values of ``parameter`` on every rank, to be changed in place; each rank then keeps its piece.

    For a divided parameter this is a collective: all ranks must call it and make the same change.
    """
    if not isinstance(parameter, DTensor):
        yield parameter.data
        return
    with torch.no_grad():
        stored = cast(DTensor, parameter.detach())
        full = stored.full_tensor()
        yield full
        piece = distribute_tensor(full, stored.device_mesh, stored.placements, src_data_rank=None)
        stored.to_local().copy_(piece.to_local())
