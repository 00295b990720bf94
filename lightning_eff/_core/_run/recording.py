"""A sampler that remembers what it emitted."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_eff._core import rng
from lightning_eff._core._samples.chosen import ChosenBatches


class RecordingSampler:
    """A sampler or batch sampler that remembers the indices it emitted, in order, until they are asked for.

    Attributes:
        emitted: what was emitted and not yet taken off by the reader.
        began: the global random state from which the last iteration began.
        begin_from: the state to begin the next iteration from, where it shall repeat an earlier one.
        pass_over: how many indices the next iteration leaves out, since they were used.
    """

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner
        self.emitted: deque[Any] = deque()
        self.began: dict[str, Any] | None = None
        self.begin_from: dict[str, Any] | None = None
        self.pass_over = 0

    def __iter__(self) -> Iterator[Any]:
        return self._emit(iter(self.inner))  # some samplers draw here, before the loader draws its workers' seed

    def _emit(self, inner: Iterator[Any]) -> Iterator[Any]:
        self.emitted.clear()
        if self.begin_from is not None:
            rng.restore(self.begin_from)
            self.begin_from = None
        self.began = rng.capture()
        used, self.pass_over = self.pass_over, 0
        for index in inner:
            if used:
                used -= 1
                continue
            self.emitted.append(index)
            yield index

    def __len__(self) -> int:
        return len(self.inner)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "emitted", "began", "begin_from", "pass_over"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def users_own(sampler: Any) -> Any:
    """The user's own sampler, behind those of this package."""
    sampler = sampler.inner if isinstance(sampler, RecordingSampler) else sampler
    return sampler.original if isinstance(sampler, ChosenBatches) else sampler
