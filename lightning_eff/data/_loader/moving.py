"""What of a training loader's settings may change while its batches, and the random numbers of the run, stay the same."""

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

from lightning_eff._core._loaders.pieces import is_settled
from lightning_eff._core._run.own_state import has_state
from lightning_eff._core._run.recording import users_own

_MOST_OBJECTS = 200_000  # of a data set that are looked at, a second or so of time
_LONG = 4096


@dataclass(frozen=True)
class Freedom:
    """What may change.

    Attributes:
        workers: the number of worker processes.
        prefetch: how far each worker looks ahead.
        pin: whether batches are put in pinned memory.
        in_epoch: changes may be made between any two batches, and not as an epoch begins alone.
        reason: why not all of it may, in words; "" where it may.
    """

    workers: bool = False
    prefetch: bool = False
    pin: bool = False
    in_epoch: bool = False
    reason: str = ""

    def both(self, other: "Freedom") -> "Freedom":
        """What this and another process may change."""
        return Freedom(
            self.workers and other.workers,
            self.prefetch and other.prefetch,
            self.pin and other.pin,
            self.in_epoch and other.in_epoch,
            self.reason or other.reason,
        )


class _Unmovable(Exception):
    """What a data set holds cannot be in several processes and mean the same."""


class _Enough(Exception):
    """Enough of a data set has been looked at."""


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Walk(pickle.Pickler):
    """Goes through what would be sent to a worker process, writing nothing.

    Args:
        fork: workers inherit it as it is: functions and classes need no name then, and what functions enclose is looked at.
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
                f"it holds a random generator ({type(obj).__name__}), of which each worker would have a copy"
            )
        if self.fork and isinstance(obj, FunctionType):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            self.enclosed += [*cells, *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()]
            return "function"
        return "class" if self.fork and isinstance(obj, type) else None


def why_unmovable(*objects: Any, fork: bool) -> str | None:
    """Why samples would not be the same if other processes made them of copies of ``objects``; None where nothing says so.

    Args:
        objects: a data set, and what makes batches of its samples.
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
            return f"it cannot be pickled, and so holds what processes do not share ({type(error).__name__}: {error})"
        left += walk.enclosed
    return None


def forks(loader: Any) -> bool:
    """Whether the loader's worker processes begin as copies of this one."""
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


def cores_of_a_rank(local_ranks: int) -> int:
    """The CPU cores that this machine lets a rank have, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // local_ranks, 1)


def freedom_of(loader: Any, *, alone: bool, chosen_by: str, cut_short: bool, drew: bool, accelerator: bool) -> Freedom:
    """What of ``loader``'s settings may change.

    Args:
        loader: the user's, as Lightning has made it.
        alone: it is the only training loader.
        chosen_by: the technique that says which samples an epoch has, or "".
        cut_short: epochs end before the loader does.
        drew: making samples has been seen to draw random numbers, or to change what the data set keeps.
        accelerator: batches are copied to a device that reads pinned memory faster.
    """
    if not isinstance(loader, DataLoader):
        return Freedom(reason=f"a {type(loader).__name__} is no torch DataLoader")
    if has_state(loader):
        return Freedom(reason=f"a {type(loader).__name__} keeps its own state, which tells of its settings")
    if type(loader).__iter__ is not DataLoader.__iter__:
        return Freedom(reason=f"{type(loader).__name__} has an iteration of its own")
    workers = loader.num_workers > 0
    if loader.persistent_workers:
        return Freedom(reason="its persistent workers go on from epoch to epoch with what they hold")
    pin = Freedom(pin=accelerator)
    if not alone:
        return _because(pin, "it is one of several, which draw from one random state in turn")
    if chosen_by:
        return _because(pin, f"{chosen_by} chooses samples, and may choose again while workers look ahead")
    if isinstance(loader.dataset, IterableDataset):
        ahead = Freedom(prefetch=workers, pin=accelerator)
        return _because(ahead, "each worker of an iterable data set has a part of it")
    samplers = (loader.sampler if loader.batch_sampler is None else loader.batch_sampler,)
    if not all(map(is_settled, samplers)):
        name = type(users_own(samplers[0])).__name__
        return _because(pin, f"its own sampler ({name}) may look at the run, and would be asked further ahead")
    if not loader.in_order:
        return _because(pin, "in_order=False lets batches come in any order")
    if _holds_generator(loader) and (cut_short or not workers):
        return _because(pin, "its generator would be further ahead as an epoch ends")
    ahead = Freedom(prefetch=workers, pin=accelerator)
    if loader.worker_init_fn is not None:
        return _because(ahead, "its worker_init_fn may make each worker another")
    if drew:
        return _because(
            ahead, "making samples draws random numbers, or changes the data set: others with other workers"
        )
    unmovable = why_unmovable(loader.dataset, loader.collate_fn, fork=forks(loader))
    if unmovable is not None:
        return _because(ahead, f"its data set ({type(loader.dataset).__name__}) stays in its processes: {unmovable}")
    return Freedom(workers=True, prefetch=True, pin=accelerator, in_epoch=True)


def _because(freedom: Freedom, reason: str) -> Freedom:
    return Freedom(freedom.workers, freedom.prefetch, freedom.pin, freedom.in_epoch, reason)


def _holds_generator(loader: Any) -> bool:
    batch_sampler = users_own(loader.batch_sampler)
    owners = (loader, users_own(loader.sampler), batch_sampler, getattr(batch_sampler, "sampler", None))
    return any(isinstance(getattr(owner, "generator", None), torch.Generator) for owner in owners)
