"""Create a training loader's iterators with other settings than its own, and with its own if those fail."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core import rng
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._run.stateful_loaders import has_state
from lightning_eff._core.loaders import ResumableLoader
from lightning_eff.data._loader.watching import Watch, WatchedCollate, WatchedStart, numbers

PATIENCE_SECONDS = 60.0  # to wait for a batch of workers that the user did not ask for


class _GaveUp(Exception):
    """An iterator with another setting could not be created in mid-epoch."""


@dataclass(frozen=True)
class Setting:
    """The settings with which a loader makes its batches.

    Attributes:
        num_workers: the number of worker processes per rank. 0 makes batches in the training process.
        prefetch_factor: the number of batches that each worker prepares ahead, 0 without workers.
        pin_memory: whether batches are in pinned memory, which makes copies to the device asynchronous.
    """

    num_workers: int = 0
    prefetch_factor: int = 0
    pin_memory: bool = False

    @property
    def lookahead(self) -> int:
        """The number of batches that are requested before they are needed."""
        return self.num_workers * self.prefetch_factor

    def __str__(self) -> str:
        ahead = f", prefetch_factor={self.prefetch_factor}" if self.num_workers else ""
        return f"num_workers={self.num_workers}{ahead}{', pin_memory=True' if self.pin_memory else ''}"


def setting_of(loader: Any) -> Setting:
    """The loader's own setting, without workers if it is not a DataLoader."""
    if not isinstance(loader, DataLoader):
        return Setting()
    workers = loader.num_workers
    return Setting(workers, (loader.prefetch_factor or 0) if workers else 0, bool(loader.pin_memory))


class LoaderTuner:
    """Creates the iterators of a loader with :attr:`setting`, and discards batches that its own setting might not give.

    A batch of another setting is used only if the workers that made it drew no random numbers and changed no number of the data
    set, and the data set in this process has not changed since they started. Otherwise, and if they fail, the loader's own
    setting makes that batch and all that follow.

    Args:
        loader: the wrapped loader.
        host_waits: returns whether the fetch that has just ended kept the device waiting.

    Attributes:
        own: the user's setting.
        setting: the setting of the iterators that are created from now on.
        active: the setting of the iterator in use.
        drew: whether making samples drew random numbers or changed the data set.
        failed: why another setting could not be used, or "".
        waited_seconds: the time of fetches during which the device was idle.
        made_seconds: the time to create iterators.
        switches: the number of changes of the active setting.
    """

    def __init__(self, loader: ResumableLoader, host_waits: Callable[[], bool]) -> None:
        self.wrapped, self.loader = loader, loader.wrapped
        self.own = self.setting = self.active = setting_of(self.loader)
        self.drew, self.failed = False, ""
        self.waited_seconds = self.made_seconds = 0.0
        self.switches = 0
        self._host_waits = host_waits
        self._watch: Watch | None = None
        self._numbers: dict[str, Any] = {}
        self._in_epoch = False

    @property
    def otherwise(self) -> bool:
        """Whether the iterator in use has another setting than the loader's own."""
        return self.active != self.own

    def switch(self, setting: Setting, *, now: bool) -> None:
        """Make batches with ``setting`` from the next batch (``now``) or the next epoch on."""
        self.setting = setting
        if not now or setting == self.active:
            return
        self._in_epoch = True
        try:
            self.wrapped.begin_again(skip=setting.num_workers > 0 and not self.drew)
        except _GaveUp:
            self.wrapped.begin_again(skip=False)
        finally:
            self._in_epoch = False

    # -- called by the loader

    def make(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Create an iterator with :attr:`setting`, or with the loader's own if that fails."""
        start, before = time.perf_counter(), rng.capture()
        generator = getattr(self.loader, "generator", None)
        state = None if generator is None else generator.get_state()
        try:
            with self._in_place(self.setting):
                iterator = begin()
        except Exception as error:
            if self.setting == self.own:
                raise
            self._give_up(error)
            if self._in_epoch:
                raise _GaveUp from error
            rng.restore(before)
            if generator is not None:
                generator.set_state(state)
            with self._in_place(self.own):
                iterator = begin()
        self.switches += self.setting != self.active
        self.active = self.setting
        self._numbers = numbers(getattr(self.loader, "dataset", None))
        self.made_seconds += time.perf_counter() - start
        return iterator

    def fetch(self, following: Callable[[], Any]) -> Any:
        """Get the next batch from the iterator in use, or with the loader's own setting if that is not reliable."""
        start = time.perf_counter()
        try:
            batch = following()
        except Exception as error:
            if not self.otherwise:
                raise
            self._give_up(error)
            batch = self._own_batch(following)
        else:
            self.drew |= self._watch is not None and self._watch.moved
            if self.active.num_workers != self.own.num_workers and (self.drew or self._changed()):
                self.drew = True
                batch = self._own_batch(following)
        if self._host_waits():
            self.waited_seconds += time.perf_counter() - start
        return batch

    def _changed(self) -> bool:
        return numbers(self.loader.dataset) != self._numbers

    def _own_batch(self, following: Callable[[], Any]) -> Any:
        self.setting = self.own
        self.wrapped.begin_again(skip=False)
        return following()

    def _give_up(self, error: Exception) -> None:
        self.failed = f"{self.setting} failed ({type(error).__name__}: {first_line(error)})"
        self.setting = self.own

    @contextmanager
    def _in_place(self, setting: Setting) -> Iterator[None]:
        """Give the loader these settings, and watch its workers."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or has_state(loader):
            yield
            return
        kept = {name: loader.__dict__[name] for name in _CHANGED}
        loader.__dict__.update(num_workers=setting.num_workers, pin_memory=setting.pin_memory)
        if setting.num_workers > 0 and not isinstance(loader.dataset, IterableDataset):
            watch = self._watch = Watch(loader.dataset)
            loader.__dict__.update(
                worker_init_fn=WatchedStart(watch, loader.worker_init_fn),
                collate_fn=WatchedCollate(watch, loader.collate_fn),
            )
        else:
            self._watch = None
        if setting.num_workers > 0:
            loader.__dict__["prefetch_factor"] = setting.prefetch_factor
            if setting != self.own and not loader.timeout:
                loader.__dict__["timeout"] = PATIENCE_SECONDS
        try:
            yield
        finally:
            loader.__dict__.update(kept)


_CHANGED = ("num_workers", "prefetch_factor", "pin_memory", "timeout", "worker_init_fn", "collate_fn")
