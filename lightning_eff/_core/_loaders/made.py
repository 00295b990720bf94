"""Which indices a batch was made of, told by the iterator that made it."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff._core._run.recording import Emission
from lightning_eff._core.batches import tensors

_MOST = 256  # batches that a loader may hold back


def is_direct(iterator: Any) -> bool:
    """Whether ``iterator`` is torch's own, over a sampler that is recorded."""
    return isinstance(getattr(iterator, "_sampler_iter", None), Emission)


def fetched(iterator: Any, fetch: Callable[[], Any]) -> tuple[Any, tuple[Any, int] | None]:
    """What ``fetch()`` gives of torch's ``iterator``, with the index that it was made of and its place in the epoch."""
    emission = iterator._sampler_iter
    if getattr(iterator, "_in_order", True):
        batch = fetch()
        return batch, emission.take()
    before = set(iterator._task_info)  # workers may finish in any order: see which task is done
    batch = fetch()
    done = before - set(iterator._task_info)
    return batch, emission.take(done.pop()) if len(done) == 1 else None


class MadeBatches:
    """The batches that a loader's inner iterators made, for as long as somebody may still hand them out.

    A loader with an iteration of its own may leave batches out, keep some back, or repeat one. A batch is known if it is the
    very object that was made, with the same tensors in it, none of them written to.
    """

    def __init__(self) -> None:
        self._batches: list[_Made] = []

    def note(self, batch: Any, origin: tuple[Any, int] | None) -> None:
        """``batch`` was made, of this index."""
        self._batches = [made for made in self._batches[-_MOST:] if made.is_held()]
        self._batches.append(_Made(batch, origin))

    def origin(self, batch: Any) -> tuple[Any, int] | None:
        """The index that ``batch`` was made of and its place in the epoch; None if it is not known."""
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
    """Stands in for a loader's ``_get_iterator``: the iterators that it makes note their batches.

    Args:
        holder: the loader that makes them.
        made: where they are noted.
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
        """Let the loader be as it was."""
        holder = self._holder()
        if holder is not None:
            holder.__dict__.pop("_get_iterator", None)
            vars(vars(holder).get("_iterator") or _Nothing()).pop("_next_data", None)


class _Nothing:
    pass


def _watch(iterator: Any, made: MadeBatches) -> None:
    if not hasattr(type(iterator), "_next_data"):
        return
    itself, next_data = (
        weakref.ref(iterator),
        type(iterator)._next_data,
    )  # no cycle: workers end with the last reference

    def noted() -> Any:
        iterator = itself()
        if not is_direct(iterator):
            return next_data(iterator)
        batch, origin = fetched(iterator, lambda: next_data(iterator))
        made.note(batch, origin)
        return batch

    iterator._next_data = noted


def sketch(batch: Any) -> list[float]:
    """A few numbers of a batch on the CPU, by which two batches can be told apart."""
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
