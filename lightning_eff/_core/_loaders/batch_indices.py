"""Find the indices of a batch from the iterator that made it."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff._core._run.recording_sampler import Emission
from lightning_eff._core.batches import tensors

_MOST = 256  # batches that a loader may keep back


def is_direct(iterator: Any) -> bool:
    """Return whether ``iterator`` is torch's own over a recorded sampler."""
    return isinstance(getattr(iterator, "_sampler_iter", None), Emission)


def fetched(iterator: Any, fetch: Callable[[], Any]) -> tuple[Any, tuple[Any, int] | None]:
    """Run ``fetch()`` of torch's ``iterator``, and return the batch with its index and its position in the epoch."""
    emission = iterator._sampler_iter
    if getattr(iterator, "_in_order", True):
        batch = fetch()
        return batch, emission.take()
    before = set(iterator._task_info)  # workers may finish in any order, so find the task that is done
    batch = fetch()
    done = before - set(iterator._task_info)
    return batch, emission.take(done.pop()) if len(done) == 1 else None


class MadeBatches:
    """The batches that a loader's inner iterators made, as long as they may still be handed out.

    A loader with its own iteration may skip, keep back or repeat batches. A batch is recognized if it is the same object with
    the same, unmodified tensors.
    """

    def __init__(self) -> None:
        self._batches: list[_Made] = []

    def note(self, batch: Any, origin: tuple[Any, int] | None) -> None:
        """Record that ``batch`` was made from this index."""
        self._batches = [made for made in self._batches[-_MOST:] if made.is_held()]
        self._batches.append(_Made(batch, origin))

    def origin(self, batch: Any) -> tuple[Any, int] | None:
        """Return the index of ``batch`` and its position in the epoch, or None if it is unknown."""
        found = next((made for made in reversed(self._batches) if made.batch is batch), None)
        return found.origin if found is not None and found.is_unchanged() else None


class _Made:
    def __init__(self, batch: Any, origin: tuple[Any, int] | None) -> None:
        self.batch, self.origin = batch, origin
        self._tensors = [tensor for _, tensor in tensors(batch)]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._own = 2 + sum(tensor is batch for tensor in self._tensors)  # references from here

    def is_held(self) -> bool:
        return sys.getrefcount(self.batch) > self._own

    def is_unchanged(self) -> bool:
        now = [tensor for _, tensor in tensors(self.batch)]
        return (
            len(now) == len(self._tensors)
            and all(a is b for a, b in zip(now, self._tensors, strict=True))
            and [_version(tensor) for tensor in now] == self._versions
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Watched:
    """Replaces a loader's ``_get_iterator`` so that its iterators record their batches.

    Args:
        holder: the loader that makes the iterators.
        made: the record.
    """

    def __init__(self, holder: DataLoader[Any], made: MadeBatches) -> None:
        self._holder, self._made = weakref.ref(holder), made
        holder.__dict__["_get_iterator"] = self
        kept = vars(holder).get("_iterator")
        if kept is not None:
            _watch(kept, made)

    def __call__(self) -> Any:
        holder = self._holder()
        assert holder is not None, "a loader outlives its own method"
        iterator = type(holder)._get_iterator(holder)
        _watch(iterator, self._made)
        return iterator

    def remove(self) -> None:
        """Restore the loader."""
        holder = self._holder()
        if holder is not None:
            holder.__dict__.pop("_get_iterator", None)
            vars(vars(holder).get("_iterator") or _Nothing()).pop("_next_data", None)


class _Nothing:
    pass


def _watch(iterator: Any, made: MadeBatches) -> None:
    if not hasattr(type(iterator), "_next_data"):
        return
    # a weak reference, so that workers end with the last reference
    itself, next_data = weakref.ref(iterator), type(iterator)._next_data

    def noted() -> Any:
        iterator = itself()
        if not is_direct(iterator):
            return next_data(iterator)
        batch, origin = fetched(iterator, lambda: next_data(iterator))
        made.note(batch, origin)
        return batch

    iterator._next_data = noted


def sketch(batch: Any) -> list[float]:
    """Take a few numbers of a batch on the CPU to distinguish batches."""
    numbers: list[float] = []
    for _, tensor in tensors(batch)[:8]:
        if tensor.device.type == "cpu" and not tensor.is_sparse and not tensor.is_quantized and tensor.numel():
            flat = tensor.detach().flatten()
            some = flat[:: max(len(flat) // 8, 1)][:8]
            numbers += [
                float(len(flat)),
                *(float(value) for value in (some.abs() if some.is_complex() else some).tolist()),
            ]
    return numbers
