"""The callback that times a trial in turns with others, and takes its numbers and memory."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.patches import Patches
from lightning_eff.advice.intervals import Numbers, Turn
from lightning_eff.monitor._counting import optimizer_tensors, tensor_bytes
from lightning_eff.monitor._held import held_bytes

#: The clock of all measurements; tests set another one.
now: Callable[[], float] = time.perf_counter
WARM_UP = 2  # batches that no turn counts
_LONGEST = 60  # batches that a technique may take to settle its settings


def queued_seconds() -> float:
    """Seconds in which this thread was ready to run and another one had the core; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Enough(Exception):
    """A trial has been measured; its run ends here."""


def tokens_of(batch: Any) -> int:
    """The tokens of a batch without padding; 0 for samples that are no sequences."""
    integers = [(p, t) for p, t in tensors(batch) if t.ndim == 2 and t.shape[1] > 1 and not t.is_floating_point()]
    masks = [t for path, t in integers if "mask" in path.lower() and int(t.max()) <= 1] if integers else []
    if masks:
        return int(masks[0].sum())
    return max((t.numel() for _, t in integers), default=0)


@of_both
class Stopwatch(Callback):
    """Times a run in turns. It must be the last callback.

    Args:
        batches: that a turn counts.
        go_on: called after each turn; whether the run is to be measured further.
        pass_on: lets others have their turns.
        numbers: take loss and gradients of the first step.
        skip: batches at the beginning of a turn that are not counted, at least; loaders' prefetched ones come on top.
    """

    def __init__(
        self,
        batches: int,
        go_on: Callable[[], bool],
        pass_on: Callable[[], None],
        *,
        numbers: bool = True,
        skip: int = 1,
    ) -> None:
        self.batches, self.skip = batches, skip
        self._go_on, self._pass_on = go_on, pass_on
        self._patches = Patches()
        self._wants_numbers = numbers
        self._stepped = self._settled = self._ready = False
        self._loss: float | None = None
        self._latest: Tensor | None = None
        self.not_finite = 0  # the batch, from 1, at which the loss was seen not to be finite; 0 if it never was
        self._count = self._in_turn = self._samples = self._tokens = 0
        self._mark = self._began = self._last = now()
        self._queued = 0.0
        self.turns: list[Turn] = []
        self.numbers: Numbers | None = None
        self.start_seconds = self.first_seconds = 0.0  # up to the first step, and of the first step
        self.memory: dict[str, int] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._patches.set(loop, "_should_check_val_fx", lambda fetcher: False)
        self._patches.set(loop, "update_lr_schedulers", lambda interval, update_plateau_schedulers: None)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_seconds = now() - self._began
        self._mark = now()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._latest = loss.detach()
        if not self._stepped:
            self._loss = (self._loss or 0.0) + float(loss.detach())
        if self._count == 1:
            batch = getattr(self, "_batch", None)
            apart = [*pl_module.parameters(), *pl_module.buffers(), *(t for _, t in tensors(batch))]
            self.memory["activations"] = held_bytes([loss], apart, loss.device)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._stepped:
            return
        self._stepped = True
        held = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self.memory["gradients"] = tensor_bytes(list(held.values()))
        if self._wants_numbers:
            own = {name: _plain(g) for name, g in held.items()}
            self.numbers = Numbers(self._loss, {n: g.detach().float().cpu().clone() for n, g in own.items()})

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch
        try:
            self._samples += num_samples(batch)
        except ValueError:
            self._samples += 1
        self._tokens += tokens_of(batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None
        self._count += 1
        if self._count == 1:
            _synchronize(trainer)
            self.first_seconds = now() - self._mark
        if self._count <= WARM_UP or not self._has_settled(trainer):
            self._begin(trainer)
            return
        if not self._ready:  # the first turn is counted once every run has been built and has warmed up
            self._ready = True
            self._measure_memory(trainer, pl_module)
            self._pass_on()
            self._begin(trainer)
            return
        self._in_turn += 1
        skipped = self._skipped(trainer)
        if self._in_turn == skipped:
            self._begin(trainer, counted=True)
        elif self._in_turn >= skipped + self._counted(trainer):
            self._end(trainer)

    def _has_settled(self, trainer: Trainer) -> bool:
        """Whether techniques that measure for themselves have done so; nobody else has a turn meanwhile."""
        if not self._settled:
            callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
            tuners = [one for one in callbacks if type(one).__name__ == "LoaderTuning"]
            self._settled = all(getattr(one, "_done", True) for one in tuners) or self._count > _LONGEST
        return self._settled

    def _counted(self, trainer: Trainer) -> int:
        """Batches of a turn that are counted.

        Workers that began together deliver together. So whole rounds of them are counted, and at least what they prepare ahead.
        """
        workers, ahead = prefetching(trainer)
        if not workers:
            return self.batches
        rounds = math.lcm(workers, int(trainer.accumulate_grad_batches))
        return math.ceil(max(self.batches, ahead) / rounds) * rounds

    def _skipped(self, trainer: Trainer) -> int:
        """Batches of a turn that are not counted: workers prepared them while others had their turns."""
        return self.skip + lookahead(trainer)

    def _begin(self, trainer: Trainer, *, counted: bool = False) -> None:
        _synchronize(trainer)
        if not counted:
            self._in_turn = 0
        self._samples = self._tokens = 0
        self._last, self._queued = now(), queued_seconds()

    def _end(self, trainer: Trainer) -> None:
        _synchronize(trainer)
        seconds, queued = now() - self._last, queued_seconds() - self._queued
        workers = lookahead(trainer) > 0
        if not self.not_finite and self._latest is not None and not bool(self._latest.isfinite().all()):
            self.not_finite = self._count
        self.turns.append(
            Turn(
                seconds,
                self._samples,
                self._tokens,
                self._in_turn - self._skipped(trainer),
                min(queued, 0.95 * seconds),
                workers,
            )
        )
        if not self._go_on():
            raise Enough
        self._pass_on()
        self._begin(trainer)

    def _measure_memory(self, trainer: Trainer, module: LightningModule) -> None:
        optimizers = [getattr(o, "_optimizer", o) for o in trainer.strategy.optimizers]
        self.memory["parameters"] = tensor_bytes(list(module.parameters()))
        self.memory["optimizer"] = tensor_bytes(optimizer_tensors(optimizers))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()


def _plain(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def lookahead(trainer: Trainer) -> int:
    """Batches that the workers of the training loaders prepare ahead."""
    return prefetching(trainer)[1]


def prefetching(trainer: Trainer) -> tuple[int, int]:
    """The workers of the training loader that has most, and the batches that they prepare ahead."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for one in callbacks:
        goal = getattr(one, "_goal", None) if type(one).__name__ == "LoaderTuning" else None
        if goal is not None:
            return int(goal.num_workers), int(goal.lookahead)
    loaders: Any = trainer.train_dataloader
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    every: list[Any] = list(several) if isinstance(several, list | tuple) else [several]
    found = [(getattr(one, "num_workers", 0), getattr(one, "prefetch_factor", 0) or 0) for one in every]
    return max(((workers, workers * factor) for workers, factor in found), default=(0, 0), key=lambda pair: pair[1])


def _synchronize(trainer: Trainer) -> None:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
