"""Batches of any make: their number of samples, and the same batch with other samples in it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


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

    Tensors whose dimension 0 is the batch's, and lists or tuples of that many non-tensors, are indexed; all else (say a
    mask that all samples share) is handed on as it is.
    """
    size = num_samples(batch) if size is None else size

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.index_select(0, index.to(value.device)) if value.ndim > 0 and value.shape[0] == size else value
        if isinstance(value, Mapping):
            picked = {key: pick(item) for key, item in value.items()}
            return picked if type(value) is dict else type(value)(picked)  # pyright: ignore[reportCallIssue]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(pick(item) for item in value))
        if isinstance(value, list | tuple):
            if len(value) == size and not tensors(value):
                return type(value)(value[i] for i in index.tolist())
            return type(value)(pick(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{f.name: pick(getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    return pick(batch)


def num_tokens(batch: Any) -> int:
    """The tokens in a batch: elements of its first 2-D integer tensor, or 0 where it has none."""
    for _, tensor in tensors(batch):
        if tensor.ndim == 2 and not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype.itemsize > 1:
            return tensor.numel()
    return 0
