"""Bytes of all tensors that live while a training step runs, exactly, on any device: what a plan's memory is held against.

The storages that are there as the step begins are found by the garbage collector, those that operations make by a dispatch
mode, and each goes when torch frees it; what FSDP resizes counts as it is resized. A caching allocator's rounding, its
fragments and the libraries' own memory are not seen.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


def local(tensor: Tensor) -> Tensor:
    """The plain tensor in a wrapper that torch's parallel code may have put around it."""
    while isinstance(tensor, DTensor | AsyncCollectiveTensor):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


class LiveBytes(TorchDispatchMode):
    """Counts live bytes while it is entered.

    Attributes:
        total: now.
        peak: the most so far.
        at_peak: the storages that lived then, by key, with their bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.peak = 0
        self.at_peak: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._ripe = False

    def add(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, once."""
        tensor = local(tensor)
        if tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.total += size - self._live.get(key, 0)
        self._live[key] = size
        self._ripe |= self.total > self.peak
        self.peak = max(self.peak, self.total)

    def _gone(self, key: int) -> None:
        self._settle()
        self._watched.pop(key, None)
        self.total -= self._live.pop(key, 0)

    def _settle(self) -> None:
        """Before bytes go, a peak that was just reached is looked at."""
        if self._ripe and self.total == self.peak:
            self.at_peak = dict(self._live)
        self._ripe = False

    @contextmanager
    def watching(self) -> Iterator["LiveBytes"]:
        """Everything that is there counts from the beginning."""
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self.add(thing)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            known = storage._cdata in self._watched
            if known:
                self._settle()
            result = resize(storage, size)
            if known:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize
            self._settle()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of ``tensors``, by key."""
    found = (local(t).untyped_storage() for t in tensors if not t.is_meta)
    return {storage._cdata: storage.nbytes() for storage in found}


class Stepped:
    """Notes what each optimizer step of this process takes: parameters, gradients and states, as they lie here.

    By torch's own hook, and not a callback's: of a module that is divided each process steps its part, and this is meant to
    count that part.

    Attributes:
        steps: of each step, the storages of "weights", "gradients" and "optimizer" with their bytes.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, dict[int, int]]] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
        grads = [p.grad for p in params if p.grad is not None]
        self.steps.append({"weights": storages(params), "gradients": storages(grads), "optimizer": storages(states)})

    @contextmanager
    def noting(self) -> Iterator["Stepped"]:
        """For the length of a run."""
        handle = register_optimizer_step_post_hook(self)
        try:
            yield self
        finally:
            handle.remove()


class WatchPeak(Callback):
    """Watches one step of a fit: what lived when the most did.

    Attributes:
        at_peak: the storages that lived then, by key, with their bytes, but for the data set's integers.

    Args:
        step: which batch, from 0; late enough for optimizer states and earlier gradients to be there.
    """

    def __init__(self, step: int = 2) -> None:
        self.step = step
        self.at_peak: dict[int, int] = {}
        self._live = LiveBytes()
        self._scope: Any = None
        self._outside: dict[int, int] = {}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            gc.collect()
            tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not t.is_floating_point()]
            self._outside = storages(tensors)
            self._scope = self._live.watching()
            self._scope.__enter__()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
            self._scope = None
            self.at_peak = {key: size for key, size in self._live.at_peak.items() if key not in self._outside}


def parts(watched: WatchPeak, stepped: Stepped) -> dict[str, int]:
    """Bytes on this process: weights, gradients and optimizer states as they lie between steps; all else at the peak; all.

    Args:
        watched: of a fit that is over, without accumulation.
        stepped: of the same.
    """
    found = stepped.steps[watched.step]
    sizes = {name: sum(held.values()) for name, held in found.items()}
    still = {key for name in ("weights", "optimizer") for key in found[name]}
    rest = sum(size for key, size in watched.at_peak.items() if key not in still)
    total = rest + sizes["weights"] + sizes["optimizer"]
    return {**sizes, "total": total, "activations": total - sum(sizes.values())}
