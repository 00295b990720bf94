"""Count the memory that operations allocate and that is alive."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (int, float, str, type(None), torch.dtype)


def key_of(tensor: Tensor) -> int:
    """Return a key of the tensor's storage, valid while the storage lives."""
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's storage, rounded as in CUDA's allocator."""
    nbytes = tensor.untyped_storage().nbytes()
    return -(-nbytes // 512) * 512 if tensor.is_cuda else nbytes


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors among the leaves of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _signature(leaf: Any) -> Any:
    """Return the part of an operation's argument on which its cost may depend."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride() if leaf.layout is torch.strided else None, leaf.dtype
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


class Ledger(TorchDispatchMode):
    """Count the storages that operations allocate and that are alive, and their largest total in bytes.

    Memory that an operation allocates and frees internally is not seen.

    Attributes:
        peak: the most bytes alive at the end of an operation.
        casts: the bytes of copies of weights in another dtype, which autocast keeps; not in ``peak``.
        operations: the operations that ran, with the shapes, strides and dtypes of tensors and all other arguments.

    Args:
        weights: keys of the storages of parameters.
        known: keys of storages that exist already.
    """

    def __init__(self, weights: set[int], known: set[int]) -> None:
        super().__init__()
        self.peak = self.casts = 0
        self.operations: list[Any] = []
        self._weights, self._known = weights, set(known)
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held: list[StorageWeakRef] = []  # while one of these is held, no other storage gets its key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.operations.append((str(func), *map(_signature, tree_leaves((args, kwargs)))))
        given = {key_of(t) for t in tensors_in((args, kwargs)) if t.layout is torch.strided}
        copies = func is torch.ops.aten._to_copy.default and bool(given & self._weights)
        self._sweep()
        for tensor in tensors_in(output):
            if tensor.layout is torch.strided:
                self._see(tensor, given, copies)
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return output

    def _see(self, tensor: Tensor, given: set[int], copies: bool) -> None:
        key = key_of(tensor)
        if key in self._live or key in self._known:
            return
        if key in given or copies:
            self.pass_over(tensor)
            self.casts += bytes_of(tensor) if copies and key not in given else 0
        else:
            self._live[key] = StorageWeakRef(tensor.untyped_storage()), bytes_of(tensor)

    def _sweep(self) -> None:
        for key in [key for key, (held, _) in self._live.items() if held.expired()]:
            del self._live[key]

    def pass_over(self, tensor: Tensor) -> None:
        """Stop counting the tensor's storage."""
        self._live.pop(key_of(tensor), None)
        self._known.add(key_of(tensor))
        self._held.append(StorageWeakRef(tensor.untyped_storage()))

    def counts(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage may be counted."""
        return key_of(tensor) not in self._known
