"""Which tensor is which, without keeping any: its storage's number, its place in it, and how often it was changed."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Identity(NamedTuple):
    """Equal for two tensors exactly where they have the same elements, as long as :class:`Storages` knows the storage."""

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int


def storage_id(x: Tensor) -> int:
    """What tells a storage from all others that exist, or to which a weak reference exists."""
    return x.untyped_storage()._cdata


def identity(x: Tensor) -> Identity:
    """What tells ``x``, as it is now, from all other tensors."""
    return Identity(storage_id(x), int(x.storage_offset()), x.shape, x.stride(), x.dtype, x._version)


class Storages:
    """Weak references to storages: no other storage gets the number of one that is known here."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def keep(self, x: Tensor) -> None:
        """Let the number of this tensor's storage stay its own."""
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage)
