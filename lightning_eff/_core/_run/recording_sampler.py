"""A sampler that records the indices of each of its iterations."""

from collections.abc import Iterable, Iterator
from typing import Any

from lightning_eff._core import rng
from lightning_eff._core._loaders.draws import Draws
from lightning_eff._core._samples.chosen import ChosenBatches

_GONE = object()


class Emission:
    """One iteration of a sampler, which keeps each index until its batch is loaded.

    Attributes:
        count: how many indices were emitted.
        offset: how many indices this iteration skipped before those.
    """

    def __init__(self, recorder: "RecordingSampler", inner: Iterator[Any]) -> None:
        self.count = self.offset = 0
        self._recorder, self._inner, self._began = recorder, inner, False
        self._waiting: dict[int, Any] = {}
        self._oldest = 0  # the oldest waiting index, if batches come in the order of their indices

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._began:
            self._begin()
        index = self._next()
        self._waiting[self.count] = index
        self.count += 1
        return index

    def _begin(self) -> None:
        self._began, recorder = True, self._recorder
        if recorder.begin_from is not None:
            rng.restore(recorder.begin_from)
            recorder.begin_from = None
        recorder.began = rng.capture()
        recorder.draws.begin(recorder.began, recorder.replays)
        recorder.replays = None
        recorder.emissions += 1
        recorder.epochs = recorder.tell_epochs()
        used, recorder.pass_over = recorder.pass_over, 0
        while self.offset < used:
            self._next()
            self.offset += 1

    def _next(self) -> Any:
        return self._recorder.draws.fetch(self.offset + self.count, self._inner.__next__)

    def take(self, number: int | None = None) -> tuple[Any, int] | None:
        """Return the ``number``-th emitted index, or the oldest, and its position in the epoch; None if already taken."""
        if number is None:
            number = self._oldest
        self._oldest = number + 1
        index = self._waiting.pop(number, _GONE)
        return None if index is _GONE else (index, number + self.offset)


class RecordingSampler:
    """A sampler or batch sampler whose iterations are :class:`Emission` objects.

    Attributes:
        inner: the recorded sampler.
        began: the global random state from which the last iteration began.
        begin_from: the state from which the next iteration begins, if it repeats an earlier one.
        draws: the random state of later draws in the last iteration.
        replays: the draws that the next iteration repeats.
        pass_over: how many used indices the next iteration skips.
        emissions: how many iterations have begun.
        epochs: the samplers' epochs when the last iteration began.
    """

    def __init__(self, inner: Iterable[Any], *, settled: bool = True) -> None:
        self.inner = inner
        self.began: dict[str, Any] | None = None
        self.begin_from: dict[str, Any] | None = None
        self.draws = Draws(watch=not settled)
        self.replays: list[Any] | None = None
        self.pass_over = self.emissions = 0
        self.epochs: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return Emission(self, iter(self.inner))  # some samplers draw here, before the loader draws its workers' seed

    def tell_epochs(self) -> list[Any]:
        """Return the epochs of the samplers inside; the loader replaces this method."""
        return []

    def __len__(self) -> int:
        return len(self.inner)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return getattr(self.inner, name)


_OWN = ("inner", "began", "begin_from", "draws", "replays", "pass_over", "emissions", "epochs")


def users_own(sampler: Any) -> Any:
    """Return the user's own sampler, without this package's wrappers."""
    sampler = sampler.inner if isinstance(sampler, RecordingSampler) else sampler
    return sampler.original if isinstance(sampler, ChosenBatches) else sampler
