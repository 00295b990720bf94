"""Batches of any make: their number of samples, and the same batch with other samples in it."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def tensors(batch: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor in ``batch`` with its path, such as ``"['labels']"`` or ``"[0]"``, in the order of the batch."""
    if isinstance(batch, Tensor):
        return [(path, batch)]
    if isinstance(batch, Mapping):
        return [found for key, value in batch.items() for found in tensors(value, f"{path}[{key!r}]")]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [found for i, value in enumerate(batch) for found in tensors(value, f"{path}[{i}]")]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [found for f in fields(batch) for found in tensors(getattr(batch, f.name), f"{path}.{f.name}")]
    return []


def lies_at(path: str, key: str | int) -> bool:
    """Whether a tensor at ``path``, as :func:`tensors` tells it, lies at the position, or under the name, ``key``."""
    if isinstance(key, int):
        return path.startswith(f"[{key}]") or (path == "" and key == 0)
    return f"[{key!r}]" in path or re.search(rf"\.{re.escape(key)}(\W|$)", path) is not None


def num_samples(batch: Any) -> int:
    """The number of samples B: the leading size that most tensors of the batch share (the first one's on a tie).

    Raises:
        ValueError: if the batch holds no tensor with a leading dimension.
    """
    sizes = [tensor.shape[0] for _, tensor in tensors(batch) if tensor.ndim > 0]
    if not sizes:
        raise ValueError(
            f"Got a batch of type {type(batch).__name__} with no tensor in it that has a batch dimension; expected a"
            " tensor, or a dict, tuple, list or dataclass of tensors whose dimension 0 counts the samples. Collate the"
            " batch into tensors."
        )
    counts = Counter(sizes)
    return max(dict.fromkeys(sizes), key=lambda size: counts[size])


def map_tensors(batch: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The batch, of the same make, with ``fn`` applied to each tensor."""
    return apply_to_collection(batch, Tensor, fn)


def select(batch: Any, index: Tensor, size: int | None = None) -> Any:
    """The batch with the samples ``index`` (long, shape (b,)) only, in that order; duplicates are allowed.

    Tensors and arrays whose dimension 0 is the batch's, and lists or tuples with one item for each sample, are
    indexed; all else (say a mask that all samples share) is handed on as it is.

    Raises:
        ValueError: if the batch holds a ``PackedSequence``, whose samples lie interleaved.
    """
    size = num_samples(batch) if size is None else size
    at = index.tolist()

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.index_select(0, index.to(value.device)) if value.ndim > 0 and value.shape[0] == size else value
        if isinstance(value, np.ndarray):
            return value[at] if value.ndim > 0 and value.shape[0] == size else value
        if isinstance(value, PackedSequence):
            raise ValueError(
                "Got a batch with a PackedSequence, whose samples lie interleaved; expected padded tensors, dimension 0"
                " of which counts the samples. Pack them in training_step."
            )
        if isinstance(value, Mapping):
            picked = {key: pick(item) for key, item in value.items()}
            if type(value) is dict:
                return picked
            other: Any = copy.copy(value)
            for key, item in picked.items():
                other[key] = item
            return other
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(pick(item) for item in value))
        if isinstance(value, list | tuple):
            by_sample = len(value) == size and not any(
                tensor.ndim > 0 and tensor.shape[0] == size for _, tensor in tensors(value)
            )
            return type(value)([value[i] for i in at] if by_sample else [pick(item) for item in value])
        if is_dataclass(value) and not isinstance(value, type):
            other = copy.copy(value)
            for f in fields(value):
                object.__setattr__(other, f.name, pick(getattr(value, f.name)))  # frozen ones too
            return other
        return value

    return pick(batch)


def num_tokens(batch: Any) -> int:
    """The tokens in a batch: elements of its first 2-D integer tensor, or 0 where it has none."""
    for _, tensor in tensors(batch):
        counts = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.itemsize > 1
        if tensor.ndim == 2 and counts:
            return tensor.numel()
    return 0
