"""Identify tensors without keeping them, by storage, place in it, and version."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Identity(NamedTuple):
    """Equal for two tensors exactly if they have the same elements, while :class:`Storages` knows the storage."""

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int


def storage_id(x: Tensor) -> int:
    """Return an id that distinguishes a storage from all others that exist or are weakly referenced."""
    return x.untyped_storage()._cdata


def identity(x: Tensor) -> Identity:
    """Return what distinguishes ``x`` in its current state from all other tensors."""
    return Identity(storage_id(x), int(x.storage_offset()), x.shape, x.stride(), x.dtype, x._version)


class Storages:
    """Weak references to storages, which keep their ids from being reused."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def keep(self, x: Tensor) -> None:
        """Keep the id of this tensor's storage from being reused."""
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage)
