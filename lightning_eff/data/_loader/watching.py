"""Detect in workers whether making samples draws random numbers or changes numbers that the data set keeps."""

import pickle
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_eff._core._loaders.generators import DataGenerators

_HELD = ("dataset", "datasets", "transform", "transforms", "target_transform")


def numbers(dataset: Any) -> dict[str, Any]:
    """Collect the plain numbers and texts of a data set, and of data sets and transforms within it, by name."""
    found: dict[str, Any] = {}
    for path, owner in _owners(dataset, "", 4):
        for name, value in vars(owner).items():
            if value is None or isinstance(value, bool | int | float | str):
                found[f"{path}.{name}"] = value
    return found


def _owners(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for index, item in enumerate(value[:64]):
            yield from _owners(item, f"{path}[{index}]", depth - 1)
        return
    if depth < 0 or not hasattr(value, "__dict__") or isinstance(value, type):
        return
    yield path, value
    for name in _HELD:
        if name in vars(value):
            yield from _owners(vars(value)[name], f"{path}.{name}", depth - 1)


class Watch:
    """Watches worker processes, and reports to the process that started them.

    It watches the global random generators, generators that the data set holds, and the data set's numbers.

    Args:
        dataset: the loader's data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._told = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._dataset = dataset
        self._generators = DataGenerators([SimpleNamespace(dataset=dataset)])
        self._before: Any = None

    @property
    def moved(self) -> bool:
        """Whether a worker drew random numbers or changed numbers of the data set."""
        return bool(self._told.item())

    def begin(self) -> None:
        """Begin in a worker, before any sample is made."""
        self._before = self._now()

    def look(self) -> None:
        """Check in a worker, after a batch has been made."""
        if not self._told.item() and self._now() != self._before:
            self._told.fill_(1)

    def _now(self) -> Any:
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        drawn = (kind, np.asarray(keys).tobytes(), position, has_gauss, cached)
        own = pickle.dumps(self._generators.states())
        return random.getstate(), drawn, torch.get_rng_state().numpy().tobytes(), numbers(self._dataset), own


class WatchedStart:
    """A ``worker_init_fn`` that begins a watch."""

    def __init__(self, watch: Watch, inner: Callable[[int], None] | None) -> None:
        self.watch, self.inner = watch, inner

    def __call__(self, worker_id: int) -> None:
        if self.inner is not None:
            self.inner(worker_id)
        self.watch.begin()


class WatchedCollate:
    """A ``collate_fn`` that checks a watch."""

    def __init__(self, watch: Watch, inner: Callable[[Any], Any]) -> None:
        self.watch, self.inner = watch, inner

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        self.watch.look()
        return batch
