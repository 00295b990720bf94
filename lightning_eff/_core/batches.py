"""Batches of any structure: count their samples, select samples, and join batches."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_eff._core._samples.counting import current_rule, own_count

_PACKED = (
    "Got a batch with a PackedSequence, whose samples are interleaved; expected padded tensors with samples in dimension 0."
    " Pack them in training_step."
)


def tensors(batch: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return every tensor in ``batch`` with its path, such as ``"['labels']"`` or ``"[0]"``, in the order of the batch."""
    if isinstance(batch, Tensor):
        return [(path, batch)]
    if type(batch) in (list, tuple):  # the checks against abstract classes are slow
        return [found for i, value in enumerate(batch) for found in tensors(value, f"{path}[{i}]")]
    if isinstance(batch, Mapping):
        return [found for key, value in batch.items() for found in tensors(value, f"{path}[{key!r}]")]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [found for i, value in enumerate(batch) for found in tensors(value, f"{path}[{i}]")]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [found for f in fields(batch) for found in tensors(getattr(batch, f.name), f"{path}.{f.name}")]
    return []


def lies_at(path: str, key: str | int) -> bool:
    """Return whether ``path``, as returned by :func:`tensors`, leads through the name or position ``key``."""
    if isinstance(key, int):
        return path.startswith(f"[{key}]") or (path == "" and key == 0)
    return f"[{key!r}]" in path or re.search(rf"\.{re.escape(key)}(\W|$)", path) is not None


def top_key(path: str) -> str | int:
    """Return the outermost name or position of ``path``, as returned by :func:`tensors`; 0 if the batch is a single tensor."""
    match = re.match(r"\[(\d+)\]|\[(['\"])(.*?)\2\]|\.(\w+)", path)
    if match is None:
        return 0
    return int(match[1]) if match[1] else match[3] or match[4]


def num_samples(batch: Any) -> int:
    """Return the number of samples B in the batch.

    :mod:`lightning_eff._core._samples.counting` decides where the run gives a count. Otherwise B is the length of the batch's
    lists, if each tensor has as many rows or lies in a list with one item per sample. Else it is the leading size that most
    tensors share, or the first tensor's on a tie.

    Raises:
        ValueError: if the batch holds no tensor with a leading dimension, and has no count itself.
    """
    found, rule = tensors(batch), current_rule()
    told = own_count(batch) if rule is None else rule.count(batch, found)
    if told is not None:
        return told
    sizes = [tensor.shape[0] for _, tensor in found if tensor.ndim > 0]
    if len(set(sizes)) > 1 and (listed := _length_of_lists(batch, found)) is not None:
        return listed
    if not sizes:
        raise ValueError(
            f"Got a batch of type {type(batch).__name__} without a tensor that has a batch dimension; expected tensors with"
            " samples in dimension 0, alone or in a dict, tuple, list or dataclass. Collate the batch into tensors."
        )
    counts = Counter(sizes)
    most = max(dict.fromkeys(sizes), key=lambda size: counts[size])
    if rule is not None:
        rule.doubt(sizes, most)
    return most


def _length_of_lists(batch: Any, found: Sequence[tuple[str, Tensor]]) -> int | None:
    """Return the number of samples for which all tensors have a row each, or lie in lists with one item per sample."""
    held = [item for _, item in _items(batch) if tensors(item)]
    lists = [item for item in held if isinstance(item, list | tuple) and not hasattr(item, "_fields")]
    lengths = {len(item) for item in lists}
    if len(lengths) != 1:
        return None
    size = lengths.pop()
    if len(lists) < len(held):
        inside = sample_of(batch, size)
    elif any(map(_ragged, lists)):
        inside = dict(found)
    else:
        return None
    return size if all(path in inside or t.ndim == 0 or t.shape[0] == size for path, t in found) else None


def map_tensors(batch: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Return the batch in the same structure, with ``fn`` applied to each tensor."""
    if type(batch) in (list, tuple) and all(isinstance(value, Tensor) for value in batch):
        return type(batch)(fn(value) for value in batch)
    if type(batch) is dict and all(isinstance(value, Tensor) for value in batch.values()):
        return {key: fn(value) for key, value in batch.items()}
    return apply_to_collection(batch, Tensor, fn)


def select(batch: Any, index: Tensor, size: int | None = None) -> Any:
    """Return the batch with only the samples ``index``, in that order.

    Tensors and arrays with B rows are indexed, and so are lists or tuples with one item per sample (:func:`sample_of`). Other
    values, such as a mask that all samples share, stay unchanged.

    Args:
        batch: the batch.
        index: sample positions, long, shape (b,); duplicates are allowed.
        size: the number of samples B; None counts them.

    Raises:
        ValueError: if the batch holds a ``PackedSequence``, whose samples are interleaved, or an object that keeps its
            tensors to itself, such as a batch of graphs.
    """
    size = num_samples(batch) if size is None else size
    at = index.tolist()

    def pick(value: Any, listed: bool = False) -> Any:
        if isinstance(value, Tensor):
            return value.index_select(0, index.to(value.device)) if value.ndim > 0 and value.shape[0] == size else value
        if isinstance(value, np.ndarray):
            return value[at] if value.ndim > 0 and value.shape[0] == size else value
        if isinstance(value, PackedSequence):
            raise ValueError(_PACKED)
        inner = _lists_samples(value, size)
        if isinstance(value, Mapping):
            return _with_items(value, {key: pick(item, inner) for key, item in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(pick(item, inner) for item in value))
        if isinstance(value, list | tuple):
            by_sample = _by_sample(value, size, listed)
            return type(value)([value[i] for i in at] if by_sample else [pick(item, inner) for item in value])
        if is_dataclass(value) and not isinstance(value, type):
            other = copy.copy(value)
            for f in fields(value):
                object.__setattr__(other, f.name, pick(getattr(value, f.name), inner))  # also if frozen
            return other
        if keeps_tensors(value):
            raise ValueError(f"G{_closed(value)}")
        return value

    return pick(batch)


def sample_of(batch: Any, size: int) -> dict[str, int]:
    """Return the sample of every tensor that lies in a list with one item per sample, by path.

    A list of ``size`` items holds samples if none of its tensors has ``size`` rows, or if its items are alike but for their
    numbers of rows. It also does if another list in the same container holds samples. Otherwise each item has a row per sample.

    Args:
        batch: the batch.
        size: the number of samples.
    """
    found: dict[str, int] = {}

    def look(value: Any, path: str, listed: bool) -> None:
        by_sample = (
            isinstance(value, list | tuple) and not hasattr(value, "_fields") and _by_sample(value, size, listed)
        )
        if by_sample:
            found.update({inner: i for i, item in enumerate(value) for inner, _ in tensors(item, f"{path}[{i}]")})
            return
        inner = _lists_samples(value, size)
        for name, item in _items(value):
            look(item, f"{path}{name}", inner)

    look(batch, "", False)
    return found


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return what a container of :func:`tensors` holds, with the parts of the paths."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name)) for f in fields(value)]
    return []


def _lists_samples(value: Any, size: int) -> bool:
    """Return whether a container holds a list of tensors that can only have one item per sample."""
    lists = [item for _, item in _items(value) if isinstance(item, list | tuple) and not hasattr(item, "_fields")]
    return any(_by_sample(item, size, False) and bool(tensors(item)) for item in lists)


def _by_sample(value: Sequence[Any], size: int, listed: bool) -> bool:
    """Return whether a list has one item per sample; ``listed`` says that another list in its container has."""
    if len(value) != size:
        return False
    return listed or _ragged(value) or not any(t.ndim > 0 and t.shape[0] == size for _, t in tensors(value))


def _ragged(value: Sequence[Any]) -> bool:
    """Return whether the items of a list are alike but for their numbers of rows, as objects in images are."""
    items = [tensors(item) for item in value]
    if len({tuple(path for path, _ in item) for item in items}) != 1:
        return False
    columns = [[t for _, t in column] for column in zip(*items, strict=True)]
    alike = [len({(t.dtype, t.shape[1:]) for t in column}) == 1 for column in columns]
    return any(same and len({t.shape[:1] for t in column}) > 1 for same, column in zip(alike, columns, strict=True))


def keeps_tensors(value: Any, deep: int = 2) -> bool:
    """Return whether ``value`` hides tensors from :func:`tensors`, as a batch of graphs does.

    Such an object has tensors in its attributes or their containers, or a ``to`` method with which Lightning moves it.
    """
    if isinstance(value, type | Tensor | Mapping | PackedSequence) or is_dataclass(value):
        return False
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
    own = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
    return callable(getattr(value, "to", None)) or any(
        bool(tensors(item)) or (deep > 0 and keeps_tensors(item, deep - 1)) for item in own
    )


def first_opaque(batch: Any) -> Any:
    """Return the first object in the batch for which :func:`keeps_tensors` holds, or None."""
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        items = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        items = [getattr(batch, f.name) for f in fields(batch)]
    elif keeps_tensors(batch):
        return batch
    return next((found for item in items if (found := first_opaque(item)) is not None), None)


def _closed(value: Any) -> str:
    return (
        f"ot a batch with an object of class {type(value).__name__}, from which samples cannot be selected; expected tensors,"
        " dicts, lists or dataclasses with one row per sample. Collate samples into these, or remove the technique."
    )


def check_indexed(batch: Any, size: int) -> None:
    """Raise ``ValueError`` unless samples can be selected.

    They can if half or more of the batch's tensors have ``size`` rows, not counting those in lists of samples.
    """
    if (closed := first_opaque(batch)) is not None:
        raise ValueError(f"g{_closed(closed)}")
    inside = sample_of(batch, size)
    leading = [t.shape[0] for path, t in tensors(batch) if t.ndim > 0 and t.shape[0] > 1 and path not in inside]
    if 2 * sum(n == size for n in leading) < len(leading):
        raise ValueError(
            f"got a batch of {size} samples whose tensors have the leading sizes {sorted(set(leading))[:5]}; expected {size},"
            " because samples are selected along dimension 0. Let the loader's collate_fn pad samples into tensors"
            " (B, ...), or remove the callback."
        )


def join(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of all ``batches`` in order, in the structure of the first.

    Values that :func:`select` would index are concatenated. All other values, such as a mask that all samples share, must
    be equal.

    Raises:
        ValueError: if the batches differ in structure, or their tensors have shapes that do not fit together.
    """
    sizes = [num_samples(batch) for batch in batches]
    return _joined(list(batches), sizes, "", False)


def _with_items(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping like ``mapping`` with other values."""
    if type(mapping) is dict:
        return items
    other: Any = copy.copy(mapping)
    for key, item in items.items():
        other[key] = item
    return other


def _joined(parts: list[Any], sizes: list[int], path: str, listed: bool) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise ValueError(
            f"Got batches with {[type(part).__name__ for part in parts]} at {path or 'their top'}; expected one type."
        )
    if isinstance(first, Tensor | np.ndarray):
        shapes = [tuple(part.shape) for part in parts]
        if all(shape[:1] == (size,) for shape, size in zip(shapes, sizes, strict=True)):
            if len({shape[1:] for shape in shapes}) > 1:
                raise ValueError(
                    f"Got batches with tensors of shapes {shapes} at {path or 'their top'}, which cannot be put together."
                )
            return torch.cat(parts) if isinstance(first, Tensor) else np.concatenate(parts)
        same = all(
            shape == shapes[0] and bool((part == first).all()) for shape, part in zip(shapes, parts, strict=True)
        )
        return first if same else _differ(path)
    if isinstance(first, PackedSequence):
        raise ValueError(_PACKED)
    inner = any(_lists_samples(part, size) for part, size in zip(parts, sizes, strict=True))
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise ValueError(f"Got batches with the keys {[list(part) for part in parts]}; expected the same in all.")
        made = {key: _joined([p[key] for p in parts], sizes, f"{path}[{key!r}]", inner) for key in first}
        return _with_items(first, made)
    if isinstance(first, list | tuple):
        return _joined_sequence(parts, sizes, path, listed, inner)
    if is_dataclass(first) and not isinstance(first, type):
        other = copy.copy(first)
        for f in fields(first):
            values = [getattr(part, f.name) for part in parts]
            object.__setattr__(other, f.name, _joined(values, sizes, f"{path}.{f.name}", inner))  # also if frozen
        return other
    return first if all(part == first for part in parts) else _differ(path)


def _joined_sequence(parts: list[Any], sizes: list[int], path: str, listed: bool, inner: bool) -> Any:
    first = parts[0]
    both = list(zip(parts, sizes, strict=True))
    by_sample = all(len(part) == size for part, size in both) and any(_by_sample(*one, listed) for one in both)
    if by_sample and not hasattr(first, "_fields"):
        return type(first)([item for part in parts for item in part])
    if any(len(part) != len(first) for part in parts):
        raise ValueError(
            f"Got batches of {[len(part) for part in parts]} items at {path or 'their top'}; expected as many in all."
        )
    made = [_joined(list(items), sizes, f"{path}[{i}]", inner) for i, items in enumerate(zip(*parts, strict=True))]
    return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)


def _differ(path: str) -> Any:
    raise ValueError(
        f"Got batches with different values at {path or 'their top'}, which count no samples; expected the same in all."
    )


def plain(batch: Any) -> Any:
    """Return the batch as dicts, lists and CPU tensors, which a checkpoint can hold; :func:`like` is the inverse."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu()
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch)
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return {f.name: plain(getattr(batch, f.name)) for f in fields(batch)}
    return batch


def like(batch: Any, saved: Any) -> Any:
    """Return ``saved``, a batch stored by :func:`plain`, in the structure of ``batch`` and on its devices."""
    if isinstance(batch, Tensor):
        return saved.to(batch.device)
    if isinstance(batch, np.ndarray):
        return saved.numpy()
    if isinstance(batch, Mapping):
        other: Any = {} if type(batch) is dict else copy.copy(batch)
        for key, value in saved.items():
            other[key] = like(batch[key], value)
        return other
    if isinstance(batch, list | tuple):
        alike = len(batch) == len(saved)  # lists with one item per sample may differ in length
        items = [like(old, new) for old, new in zip(batch, saved, strict=True)] if alike else saved
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        other = copy.copy(batch)
        for f in fields(batch):
            object.__setattr__(other, f.name, like(getattr(batch, f.name), saved[f.name]))
        return other
    return saved


def num_tokens(batch: Any) -> int:
    """Return the number of tokens in the batch, or 0 if it has none.

    Tokens are the elements of the first 2-D integer tensor in which one dimension counts the samples, or which has one
    row of packed sequences. So the edges (2, E) of a graph are not counted.
    """
    every, rule = tensors(batch), current_rule()
    found = [
        (path, t)
        for path, t in every
        if t.ndim == 2 and not (t.is_floating_point() or t.is_complex()) and t.dtype.itemsize > 1
    ]
    if not found:
        return 0
    size, known = num_samples(batch), None if rule is None else rule.counting_samples(every)
    fits = [t for path, t in found if t.shape[0] == 1 or (size in t.shape and (known is None or path in known))]
    return fits[0].numel() if fits else 0
