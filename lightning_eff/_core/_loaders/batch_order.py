"""The parts of a loader that determine the order of its batches: samplers, their epochs and generators, and counters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_eff._core._lightning.names import is_lightnings
from lightning_eff._core._loaders.generators import DataGenerators
from lightning_eff._core._loaders.sampler_state import Held
from lightning_eff._core._run.recording_sampler import RecordingSampler, users_own
from lightning_eff._core._run.stateful_loaders import has_state

# samplers whose order follows from the random state at the beginning of the epoch
_SETTLED: tuple[Callable[..., Any], ...] = tuple(
    cls.__iter__
    for cls in (
        BatchSampler,
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )
)


def is_settled(sampler: Any) -> bool:
    """Return whether the order of ``sampler`` follows from the beginning of the epoch, as for those of torch and Lightning."""
    sampler = users_own(sampler)
    inner = getattr(sampler, "sampler", None) if isinstance(sampler, BatchSampler) else None
    if inner is not None and not is_settled(inner):
        return False
    return _is_known(sampler) and not has_state(sampler)


def _is_known(sampler: Any) -> bool:
    return type(sampler).__iter__ in _SETTLED or is_lightnings(type(sampler))


def iterates_itself(loader: Any) -> bool:
    """Return whether iterating ``loader`` runs the user's own code, not only torch's iterator over its sampler."""
    if not isinstance(loader, DataLoader):
        return True
    own = type(loader).__iter__
    return own is not DataLoader.__iter__ and not own.__module__.startswith("torchdata.stateful_dataloader")


def sampler_name(loader: DataLoader[Any]) -> str:
    """Return the attribute with the sampler that a ``DataLoader`` takes its indices from."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def holders(loader: DataLoader[Any]) -> list[DataLoader[Any]]:
    """Return the loaders that take indices from ``loader``'s sampler: itself, and inner loaders that it delegates to."""
    name = sampler_name(loader)
    sampler = getattr(loader, name)
    found = [loader, *(value for value in vars(loader).values() if isinstance(value, DataLoader))]
    return [holder for holder in found if vars(holder).get(name) is sampler]


def put_sampler(holder: DataLoader[Any], sampler: Any) -> None:
    """Let ``holder`` take its indices from ``sampler``, also in persistent workers."""
    holder.__dict__[sampler_name(holder)] = sampler  # DataLoader.__setattr__ refuses
    kept = vars(holder).get("_iterator")
    if kept is not None:
        kept._index_sampler = sampler


def begin_workers(loader: Any) -> None:
    """Start the persistent workers of ``loader``, without asking its sampler; the next iteration is then as after an epoch.

    The first iteration of a ``StatefulDataLoader`` begins its sampler twice, and later ones only once.
    """
    name = sampler_name(loader)
    sampler = getattr(loader, name)
    loader.__dict__[name] = []
    try:
        iter(loader)
    finally:
        put_sampler(loader, sampler)


class Pieces:
    """The parts of one loader.

    Args:
        loader: the user's loader. If it has its own iteration, its inner loaders count too.

    Attributes:
        data: the generators of its data set.
    """

    def __init__(self, loader: Any) -> None:
        self._loaders = [loader, *(_inside(vars(loader)) if iterates_itself(loader) and _has_vars(loader) else [])]
        self._counts = loader if iterates_itself(loader) and _has_vars(loader) else None
        self._fresh = self._numbers()
        self.data = DataGenerators(self._loaders)
        self._held = Held({id(s): s for s in self._samplers() if not _is_known(s)}.values())

    def _samplers(self) -> list[Any]:
        found: list[Any] = []
        for loader in self._loaders:
            batch_sampler = getattr(loader, "batch_sampler", None)
            found += [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        return [users_own(sampler) for sampler in found if sampler is not None]

    def epoch_samplers(self) -> list[Any]:
        """Return the samplers with ``set_epoch``."""
        return list({id(s): s for s in self._samplers() if callable(getattr(s, "set_epoch", None))}.values())

    def epochs(self) -> list[Any]:
        """Return the epochs of those samplers."""
        return [getattr(sampler, "epoch", None) for sampler in self.epoch_samplers()]

    def set_epochs(self, epochs: Iterable[Any]) -> None:
        """Restore :meth:`epochs`."""
        for sampler, epoch in zip(self.epoch_samplers(), epochs, strict=False):
            if epoch is not None:
                sampler.set_epoch(epoch)

    def set_seeds(self, seeds: Iterable[Any]) -> None:
        """Set the seeds of distributed samplers, which Lightning takes from the process's seed."""
        for sampler, seed in zip(self.epoch_samplers(), seeds, strict=False):
            if seed is not None:
                sampler.seed = seed

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(owner, "generator", None) for owner in (*self._loaders, *self._samplers())]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def generators(self) -> list[Any]:
        """Return the states of the generators of the loaders, their samplers and their data."""
        return [*(generator.get_state() for generator in self._generators()), *self.data.states()]

    def set_generators(self, states: Iterable[Any]) -> None:
        """Restore :meth:`generators`."""
        states = list(states)
        tensors = [state for state in states if isinstance(state, torch.Tensor)]
        for generator, state in zip(self._generators(), tensors, strict=False):
            generator.set_state(state)
        self.data.set(state for state in states if not isinstance(state, torch.Tensor))

    def _numbers(self) -> dict[str, Any]:
        held = {} if self._counts is None else vars(self._counts)
        return {name: value for name, value in held.items() if type(value) in (int, float, bool)}

    def numbers(self) -> dict[str, Any]:
        """Return the plain numbers of a loader with its own iteration that changed in the run."""
        return {k: v for k, v in self._numbers().items() if k not in self._fresh or self._fresh[k] != v}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        """Restore :meth:`numbers`."""
        if self._counts is not None:
            vars(self._counts).update({**self._fresh, **numbers})

    def held(self) -> list[dict[str, Any]]:
        """Return the attributes of custom samplers that changed in the run, such as NumPy generators."""
        return self._held.saved()

    def set_held(self, held: Iterable[dict[str, Any]]) -> None:
        """Restore :meth:`held`."""
        self._held.set(held)

    @property
    def outlives_epochs(self) -> bool:
        """Whether an iterator with workers persists from epoch to epoch, so an epoch cannot begin again."""
        held = [] if self._counts is None else vars(self._counts).values()
        return any(getattr(value, "_num_workers", 0) and hasattr(value, "_sampler_iter") for value in held)


def _has_vars(loader: Any) -> bool:
    return hasattr(loader, "__dict__")


def _inside(value: Any, depth: int = 2) -> list[Any]:
    """Return the DataLoaders in ``value`` and in its lists and dicts."""
    if isinstance(value, DataLoader):
        return [value]
    if depth and isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [found for part in parts for found in _inside(part, depth - 1)]
    return []


def record(sources: Iterable[DataLoader[Any]], sampler: Any, tell_epochs: Callable[[], list[Any]]) -> RecordingSampler:
    """Put a :class:`RecordingSampler` over ``sampler`` into ``sources``."""
    recorder = RecordingSampler(sampler, settled=is_settled(sampler))
    recorder.tell_epochs = tell_epochs
    for holder in sources:
        put_sampler(holder, recorder)
    return recorder


def shut_down(iterator: Any) -> None:
    """Shut down the worker processes of an iterator, if it has any."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if callable(stop):
        stop()


def has_length(loader: Any) -> bool:
    """Return whether ``len(loader)`` is known."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
