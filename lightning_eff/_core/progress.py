"""The fraction ``u`` in [0, 1] of the run's budget that is used; steps, epochs or seconds, whichever ends the run first.

This module also repairs Lightning's record of progress in checkpoints, and saves the gradients of an open accumulation
window.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_eff._core._lightning.names import is_a, of_both
from lightning_eff._core._needs.needs import Part
from lightning_eff._core._needs.offers import is_plain, parts_of
from lightning_eff._core._resume import sharded_gradients
from lightning_eff._core._run.processes import replica


@of_both
class Clock(Callback):
    """A callback that measures the run's budget in a custom unit. If a trainer has one, all other limits are ignored."""

    def share(self) -> float:
        """Return the fraction of the budget that is used, in [0, 1], the same on all ranks."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define share(). Return the used fraction of the budget."
        )


class Progress:
    """The fraction ``u`` of the budget that is used, constant within one optimizer step.

    ``u`` is the largest of ``global_step / max_steps``, ``epochs / max_epochs`` (counted in batches if the loader has a
    length), ``seconds / max_time``, and ``tokens / max_tokens`` or ``scaled_steps / max_scaled_steps`` if a technique counts
    them. It is read at the first micro-batch of an accumulation window, and where a run resumes within one. So nothing that
    depends on it changes between micro-batches whose gradients are summed. Every rank uses rank 0's time. A :class:`Clock`
    among the trainer's callbacks replaces all of these.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.u = 0.0
        self.max_tokens: int | None = None
        self.tokens = 0
        self.max_scaled_steps: float | None = None
        self.scaled_steps = 0.0
        self._fresh = True
        self._callbacks: list[Callback] | None = None  # those among which the next two were found
        self._clock: Clock | None = None
        self._timers: list[Timer] = []

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name: ``max_steps``, ``max_epochs``, ``max_time`` (seconds), and techniques'."""
        trainer = self._trainer
        self._find()
        if self._clock is not None:
            return {"clock": 1.0}
        found: dict[str, float] = {}
        if trainer.max_steps not in (-1, None):
            found["max_steps"] = trainer.max_steps
        if trainer.max_epochs not in (-1, None):
            found["max_epochs"] = float(trainer.max_epochs)
        timer = self._timer()
        if timer is not None:
            found["max_time"] = float(timer._duration or 0.0)
        if self.max_tokens is not None:
            found["max_tokens"] = float(self.max_tokens)
        if self.max_scaled_steps is not None:
            found["max_scaled_steps"] = float(self.max_scaled_steps)
        return found

    def update(self, batch_idx: int) -> None:
        """Read ``u`` again if ``batch_idx`` opens an accumulation window, or the run resumes within one."""
        window = self._trainer.accumulate_grad_batches
        if self._fresh or batch_idx % window == 0:
            self._fresh = False
            self.u = self._read(batch_idx - batch_idx % window)

    def after(self, batch_idx: int) -> float:
        """Return the value of ``u`` after the batch ``batch_idx``. All ranks must call it."""
        return self._read(batch_idx + 1)

    def _read(self, batch_idx: int) -> float:
        trainer = self._trainer
        self._find()
        if self._clock is not None:
            return min(max(self._clock.share(), 0.0), 1.0)
        u = 0.0
        if trainer.max_steps not in (-1, None):
            u = max(u, trainer.global_step / max(trainer.max_steps, 1))
        if trainer.max_epochs not in (-1, None):
            batches = trainer.num_training_batches
            within = batch_idx / batches if math.isfinite(batches) and batches > 0 else 0.0
            u = max(u, (trainer.current_epoch + within) / max(trainer.max_epochs or 1, 1))
        timer = self._timer()
        if timer is not None:
            share = timer.time_elapsed("train") / max(timer._duration or 0.0, 1e-9)
            if trainer.world_size > 1:
                share = trainer.strategy.broadcast(share)
            u = max(u, share)
        if self.max_tokens is not None:
            u = max(u, self.tokens / self.max_tokens)
        if self.max_scaled_steps is not None:
            u = max(u, self.scaled_steps / self.max_scaled_steps)
        return min(u, 1.0)

    def _find(self) -> None:
        """Look for a clock and timers, if the callbacks are others than before, as during the trials of Lightning's tuners."""
        callbacks: list[Callback] = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        before = self._callbacks
        if before is not None and len(before) == len(callbacks) and all(map(operator.is_, before, callbacks)):
            return
        self._callbacks = list(callbacks)
        self._clock = next((c for c in callbacks if isinstance(c, Clock)), None)
        self._timers = [c for c in callbacks if is_a(c, Timer)]

    def _timer(self) -> Timer | None:
        timers = [timer for timer in self._timers if timer._duration is not None]
        return min(timers, key=lambda timer: timer._duration or 0.0, default=None)


def mend_loops(checkpoint: dict[str, Any], *, by_steps: bool, accumulate: int) -> None:
    """Repair the fit loop's progress in ``checkpoint`` in place, where resuming would lose count.

    Lightning 2.6 resumes exactly from a checkpoint saved at the end of a batch. Two other moments lose count. From the end of
    an epoch, a run with ``max_steps`` trains a batch of the finished epoch again. After ``max_steps`` stopped a run
    mid-epoch, the epoch counts as complete. Both are rewritten as if saved at the end of the last batch.

    Args:
        checkpoint: the checkpoint that Lightning saved.
        by_steps: whether the resuming trainer has ``max_steps``.
        accumulate: batches per accumulation window.
    """
    fit = checkpoint.get("loops", {}).get("fit_loop")
    if fit is None:
        return
    epoch, batch = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    now = batch["current"]
    ended_with_batch = now["ready"] == now["started"] == now["processed"] == now["completed"] > 0
    epoch_processed = epoch["current"]["processed"] == epoch["current"]["started"]
    if not (ended_with_batch and epoch_processed):
        return
    if batch["is_last_batch"] and not by_steps:
        return
    for counts in (batch["total"], batch["current"]):
        counts["completed"] -= 1
    for counts in (epoch["total"], epoch["current"]):
        counts["processed"] -= 1
        counts["completed"] = counts["processed"]
    loop = fit["epoch_loop.state_dict"]
    stepped = batch["is_last_batch"] or now["ready"] % accumulate == 0
    if "_batches_that_stepped" in loop and stepped:  # counted again when Lightning completes the batch
        loop["_batches_that_stepped"] -= 1


def in_flight(trainer: Trainer) -> bool:
    """Return whether a batch has been fetched and its step has not ended."""
    counts = trainer.fit_loop.epoch_loop.batch_progress.current.state_dict()
    return counts["ready"] > counts["processed"]


def ends_batch(trainer: Trainer) -> bool:
    """Return whether a batch has been trained on and its end hooks are being called."""
    counts = trainer.fit_loop.epoch_loop.batch_progress.current.state_dict()
    return counts["processed"] > counts["completed"]


def in_window(trainer: Trainer, module: LightningModule, *, stepped: bool) -> bool:
    """Return whether gradients are accumulated that no optimizer step has used yet.

    Args:
        trainer: the trainer, in a fit or after it.
        module: its module. One with manual optimization decides itself when gradients are used.
        stepped: whether an optimizer stepped since the last batch began.
    """
    loop = trainer.fit_loop.epoch_loop
    done = loop.batch_progress.current.state_dict()["processed"]
    if not module.automatic_optimization:
        return done > 0 and not stepped
    over = not in_flight(trainer) and loop._num_ready_batches_reached()  # the epoch's last window may be a short one
    return done % trainer.accumulate_grad_batches != 0 and not over


@runtime_checkable
class HoldsGradients(Protocol):
    """A strategy that can return the gradients of an open accumulation window."""

    def open_gradients(self) -> tuple[list[dict[str, Tensor]], list[str]] | None:
        """Return on rank 0 the full gradients of each replica by the plain module's names. Collective.

        Returns:
            The gradients of each replica, and the names of those that are already means over all replicas. None if they are
            gone.
        """
        ...

    def take_up_gradients(self, replicas: list[dict[str, Tensor]], averaged: list[str]) -> None:
        """Restore the result of :meth:`open_gradients`, in this layout or another. Collective."""
        ...


def open_gradients(
    trainer: Trainer,
    module: LightningModule,
    *,
    stepped: bool,
    backward_done: bool,
    gather: Callable[[Any], list[Any]],
) -> dict[str, Any]:
    """Return the gradients of an open accumulation window, on the CPU, by parameter name; empty outside a window.

    They are saved, not recomputed from the window's first batch. The window's batches have already changed BatchNorm
    statistics, metrics and techniques, and would do so twice.

    Args:
        trainer: as in :func:`in_window`.
        module: as in :func:`in_window`.
        stepped: as in :func:`in_window`.
        backward_done: whether the backward pass of the current batch has ended.
        gather: returns ``value`` of every rank, in rank order, on every rank.

    Returns:
        "gradients": those of each replica. "averaged": the names of those that are already means over all replicas.
    """
    nothing: dict[str, Any] = {"gradients": [], "averaged": []}
    if not in_window(trainer, module, stepped=stepped):
        return nothing
    if in_flight(trainer) and backward_done:
        return nothing  # they include the gradients of a batch that a resumed run trains on again
    strategy = trainer.strategy
    if is_plain(strategy):
        own = {n: p.grad.detach().to("cpu", copy=True) for n, p in module.named_parameters() if p.grad is not None}
        return {**nothing, "gradients": gather(own)}
    if Part.ITSELF in parts_of(strategy):
        found = sharded_gradients.collect(trainer, module, gather)
    else:
        found = strategy.open_gradients() if isinstance(strategy, HoldsGradients) else None
    if found is None:
        rank_zero_warn(
            f"{type(strategy).__name__}: this checkpoint is saved within an accumulation window, without its gradients, so a"
            " resumed run will differ from an uninterrupted one. Save after optimizer steps during the fit, such as with"
            " ModelCheckpoint(every_n_train_steps=1)."
        )
        return nothing
    return {"gradients": found[0], "averaged": found[1]}


@torch.no_grad()
def take_up(
    trainer: Trainer, module: LightningModule, replicas: list[dict[str, Tensor]], averaged: list[str], *, count: bool
) -> None:
    """Restore the gradients of :func:`open_gradients` when a resumed run starts training, and with ``count`` the next epoch.

    If a run resumes from the end of an epoch, Lightning 2.6 does not count the next epoch as ready and started. A run that is
    interrupted again at the end of that epoch then resumes with one epoch too few.
    """
    strategy = trainer.strategy
    if replicas and isinstance(strategy, HoldsGradients):
        strategy.take_up_gradients(replicas, averaged)
    elif replicas and Part.ITSELF in parts_of(strategy):
        sharded_gradients.take_up(trainer, module, replicas, averaged)
    elif replicas:
        saved = replicas[replica(trainer)[0]]
        for name, p in module.named_parameters():
            if name in saved and p.requires_grad:
                p.grad = saved[name].to(p.device, copy=True)
    loop = trainer.fit_loop
    counts = loop.epoch_progress.total.state_dict()
    if count and loop.restarted_mid_epoch and counts["processed"] == counts["started"]:
        loop.epoch_progress.increment_ready()
        loop.epoch_progress.increment_started()
