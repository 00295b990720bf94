"""Find out which settings of a training loader can change without changing its batches or the run's random numbers."""

import multiprocessing
import os
import pickle
import random
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core._loaders.batch_order import is_settled
from lightning_eff._core._run.recording_sampler import users_own
from lightning_eff._core._run.stateful_loaders import has_state

_MOST_OBJECTS = 200_000  # of a data set that are examined, in about a second
_LONG = 4096


@dataclass(frozen=True)
class Freedom:
    """The settings that may change.

    Attributes:
        workers: the number of worker processes may change.
        prefetch: the number of batches that each worker prepares ahead may change.
        pin: the use of pinned memory may change.
        in_epoch: settings may change between any two batches, not only when an epoch begins.
        reason: why some setting may not change, or "".
    """

    workers: bool = False
    prefetch: bool = False
    pin: bool = False
    in_epoch: bool = False
    reason: str = ""

    def both(self, other: "Freedom") -> "Freedom":
        """The settings that both this and another process may change."""
        return Freedom(
            self.workers and other.workers,
            self.prefetch and other.prefetch,
            self.pin and other.pin,
            self.in_epoch and other.in_epoch,
            self.reason or other.reason,
        )


class _Unmovable(Exception):
    """A data set holds something that several processes cannot share."""


class _Enough(Exception):
    """Enough of a data set has been examined."""


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Walk(pickle.Pickler):
    """Walks through the objects that a worker process would get, without writing anything.

    Args:
        fork: whether workers inherit the objects. Functions and classes need no name then, and closures are examined.
    """

    def __init__(self, *, fork: bool) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda buffer: None)
        self.fork, self.seen = fork, 0
        self.enclosed: list[Any] = []

    def persistent_id(self, obj: Any) -> str | None:
        self.seen += 1
        if self.seen > _MOST_OBJECTS:
            raise _Enough
        if isinstance(obj, torch.Tensor):
            if obj.device.type != "cpu":
                raise _Unmovable(f"it holds a tensor on {obj.device}")
            return "tensor"
        if isinstance(obj, np.ndarray) and obj.dtype != object:
            return "array"
        if isinstance(obj, str | bytes | bytearray) and len(obj) > _LONG:
            return "text"
        if isinstance(obj, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            raise _Unmovable(
                f"it holds a random generator ({type(obj).__name__}), and each worker would have its own copy"
            )
        if self.fork and isinstance(obj, FunctionType):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            self.enclosed += [*cells, *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()]
            return "function"
        return "class" if self.fork and isinstance(obj, type) else None


def why_unmovable(*objects: Any, fork: bool) -> str | None:
    """Explain why other processes with copies of ``objects`` would make other samples, or return None.

    Args:
        objects: a data set and its collate function.
        fork: whether worker processes begin as copies of this one.
    """
    left, seen = list(objects), set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        walk = _Walk(fork=fork)
        try:
            walk.dump(value)
        except _Unmovable as found:
            return str(found)
        except _Enough:
            pass
        except Exception as error:
            return f"it cannot be pickled, so processes cannot share it ({type(error).__name__}: {error})"
        left += walk.enclosed
    return None


def forks(loader: Any) -> bool:
    """Whether the loader's worker processes begin as copies of this one."""
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


def cores_of_a_rank(local_ranks: int) -> int:
    """The number of CPU cores per rank on this machine, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // local_ranks, 1)


def freedom_of(loader: Any, *, alone: bool, chosen_by: str, cut_short: bool, drew: bool, accelerator: bool) -> Freedom:
    """Find out which of a loader's settings may change.

    Args:
        loader: the user's loader, after Lightning's changes.
        alone: whether it is the only training loader.
        chosen_by: the technique that chooses the samples of an epoch, or "".
        cut_short: whether epochs end before the loader does.
        drew: whether making samples drew random numbers or changed the data set.
        accelerator: whether batches are copied to a device that reads pinned memory faster.
    """
    if not isinstance(loader, DataLoader):
        return Freedom(reason=f"a {type(loader).__name__} is not a torch DataLoader")
    if has_state(loader):
        return Freedom(reason=f"a {type(loader).__name__} keeps its own state, which depends on its settings")
    if type(loader).__iter__ is not DataLoader.__iter__:
        return Freedom(reason=f"{type(loader).__name__} has its own iteration")
    workers = loader.num_workers > 0
    if loader.persistent_workers:
        return Freedom(reason="its persistent workers keep their state from epoch to epoch")
    pin = Freedom(pin=accelerator)
    if not alone:
        return _because(pin, "it is one of several loaders, which share one random state")
    if chosen_by:
        return _because(pin, f"{chosen_by} chooses samples, and may choose again while workers prefetch")
    if isinstance(loader.dataset, IterableDataset):
        ahead = Freedom(prefetch=workers, pin=accelerator)
        return _because(ahead, "each worker of an iterable data set has its own part of the data")
    samplers = (loader.sampler if loader.batch_sampler is None else loader.batch_sampler,)
    if not all(map(is_settled, samplers)):
        name = type(users_own(samplers[0])).__name__
        return _because(pin, f"its sampler ({name}) may depend on the run, and workers would ask it further ahead")
    if not loader.in_order:
        return _because(pin, "in_order=False allows batches in any order")
    if _holds_generator(loader) and (cut_short or not workers):
        return _because(pin, "its random generator would be further ahead when an epoch ends")
    ahead = Freedom(prefetch=workers, pin=accelerator)
    if loader.worker_init_fn is not None and not _seeds_only(loader.worker_init_fn):
        return _because(ahead, "its worker_init_fn may make workers differ")
    if drew:
        return _because(
            ahead, "making samples draws random numbers or changes the data set, which depends on the workers"
        )
    unmovable = why_unmovable(loader.dataset, loader.collate_fn, fork=forks(loader))
    if unmovable is not None:
        return _because(
            ahead, f"its data set ({type(loader.dataset).__name__}) cannot move to other processes: {unmovable}"
        )
    return Freedom(workers=True, prefetch=True, pin=accelerator, in_epoch=True)


def _seeds_only(worker_init_fn: Any) -> bool:
    """Whether this is Lightning's own function, which ``seed_everything(workers=True)`` adds and which seeds each worker.

    Samples that draw nothing do not depend on the seed, and others are found as they draw.
    """
    function = getattr(worker_init_fn, "func", worker_init_fn)
    module = str(getattr(function, "__module__", ""))
    return module.split(".")[0] in ("lightning", "lightning_fabric") and function.__name__ == "pl_worker_init_function"


def _because(freedom: Freedom, reason: str) -> Freedom:
    return Freedom(freedom.workers, freedom.prefetch, freedom.pin, freedom.in_epoch, reason)


def _holds_generator(loader: Any) -> bool:
    batch_sampler = users_own(loader.batch_sampler)
    owners = (loader, users_own(loader.sampler), batch_sampler, getattr(batch_sampler, "sampler", None))
    return any(isinstance(getattr(owner, "generator", None), torch.Generator) for owner in owners)
