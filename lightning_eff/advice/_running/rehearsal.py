"""A short run with a validation in it, during which problems are looked for."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core.patches import Patches
from lightning_eff.advice._running.stopwatch import Enough

STEPS = 14  #: batches of training
VALIDATED = 4  #: batches of validation


@of_both
class Rehearsal(Callback):
    """Lets a run train for some batches, validate on some more, and end.

    Args:
        limit: seconds of training.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._began, self._batches, self._due = limit, time.monotonic(), 0, False
        self._patches = Patches()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._patches.set(loop, "_should_check_val_fx", lambda fetcher: self._due)
        self._patches.set(loop, "update_lr_schedulers", lambda interval, update_plateau_schedulers: None)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due:
            raise Enough
        self._batches += 1
        late = time.monotonic() - self._began > self._limit and self._batches >= 4
        self._due = self._batches >= STEPS or late
        if self._due and not trainer.enable_validation:
            raise Enough

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx + 1 >= VALIDATED:
            raise Enough

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise Enough

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()
