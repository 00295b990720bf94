"""One weight at a time, whole, to be changed in place, also where it lies in pieces on the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@contextmanager
def whole(parameter: Tensor) -> Iterator[Tensor]:
    """The numbers of ``parameter``, to be changed in place: all of them, on every rank, of which each then keeps its piece.

    A collective for one that is divided: all ranks must come here, and change it alike.
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
