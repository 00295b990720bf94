"""Lightning's fit loop, continued from where a checkpoint was saved, with the work that was still due there.

Lightning continues with the next batch or epoch. It loses the remaining callbacks' hooks, the module's own hook, validation,
scheduler steps and logging that an uninterrupted run does in between. Here the loops keep exactly their counts, and continue
inside the hook.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_eff._core._resume.packing import Unpackable, unpack
from lightning_eff._core._resume.position import (
    BATCH_END,
    EPOCH_END,
    EPOCH_START,
    IN_VALIDATION,
    VALIDATION_END,
    VALIDATION_EPOCH_END,
    calling_only,
    reads,
    with_state_keys,
)


class ResumedFit:
    """One run of a trainer's fit loop that begins within a hook.

    Args:
        trainer: the trainer, with its loops' counts loaded.
        saved: the position, as written by :meth:`Resume.save`.
        arguments: the packed arguments of ``on_train_batch_end``; None if they are not needed.
        in_validation: called before the rest of a validation, with the callbacks whose ``on_validation_end`` is still due.
    """

    def __init__(
        self,
        trainer: Trainer,
        saved: dict[str, Any],
        arguments: list[Any] | None,
        in_validation: Callable[[list[Any]], None],
    ) -> None:
        self._trainer: Any = trainer  # some of its attributes are not declared
        self._saved, self._arguments = saved, arguments
        self._in_validation = in_validation
        self._loop: Any = trainer.fit_loop
        self._epoch: Any = trainer.fit_loop.epoch_loop
        self._names: Any = sys.modules[type(self._loop).__module__]  # in the trainer's Lightning package

    def run(self) -> None:
        """Run in place of ``FitLoop.run``."""
        loop, epoch = self._loop, self._epoch
        loop.setup_data()
        if loop.max_batches == 0 or self._trainer.limit_train_batches == 0:
            return
        torch.set_grad_enabled(True)
        for part in (loop, epoch, epoch.val_loop):
            part._restarting = False
            part.reset_restart_stage()
        counts = loop.epoch_progress.state_dict()
        loop.on_run_start()  # counts an epoch as complete although its end is still due
        loop.epoch_progress.load_state_dict(counts)
        try:
            self._finish_epoch()
            loop.on_iteration_done()
            while not loop.done:
                try:
                    loop.on_advance_start()
                    loop.advance()
                    loop.on_advance_end()
                finally:
                    loop.on_iteration_done()
        except StopIteration:
            loop.on_iteration_done()
        loop._restarting = False
        loop.on_run_end()

    def _finish_epoch(self) -> None:
        hook, loop, epoch = self._saved["hook"], self._loop, self._epoch
        if hook == EPOCH_START:
            loop._restart_stage = self._names.RestartStage.RESTARTED_ON_EPOCH_START
            loop._resuming_from_checkpoint = False
            with self._only(EPOCH_START):
                loop.on_advance_start()
            loop.advance()
            loop.on_advance_end()
            return
        if hook == EPOCH_END:
            for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
                counts.processed -= 1
            if epoch.done:
                with self._only(EPOCH_END):
                    loop.on_advance_end()
                return
            # the saved run ended mid-epoch, and this one does not
        elif epoch._num_ready_batches_reached():
            # until the next epoch no batch is fetched, and no samples are chosen
            self._finish_batch(loop._data_fetcher)
            epoch.on_iteration_done()
            loop.on_advance_end()
            return
        loop._restart_stage = self._names.RestartStage.RESTARTED_MID_EPOCH
        loop.on_advance_start()
        with self._trainer.profiler.profile("run_training_epoch"):
            self._go_on(loop._data_fetcher)
        loop.on_advance_end()

    def _go_on(self, fetcher: Any) -> None:
        """Run ``_TrainingEpochLoop.run`` from within a batch."""
        epoch = self._epoch
        epoch.on_run_start(fetcher)
        try:
            self._finish_batch(fetcher)
            epoch.on_iteration_done()
            while not epoch.done:
                try:
                    epoch.advance(fetcher)
                    epoch.on_advance_end(fetcher)
                finally:
                    epoch.on_iteration_done()
        except StopIteration:
            epoch.on_iteration_done()

    def _finish_batch(self, fetcher: Any) -> None:
        hook, epoch, trainer = self._saved["hook"], self._epoch, self._trainer
        connector: Any = trainer._logger_connector
        if hook == BATCH_END:
            self._call_batch_end()
            connector.on_batch_end()
            epoch.batch_progress.increment_completed()
            connector.update_train_step_metrics()
            epoch.on_advance_end(fetcher)
            return
        if hook in (VALIDATION_END, VALIDATION_EPOCH_END):
            self._finish_validation()
            epoch._skip_next_val = True
        connector._first_loop_iter = epoch.batch_progress.current.ready == 1
        if hook != EPOCH_END:
            epoch.on_advance_end(fetcher)

    def _call_batch_end(self) -> None:
        trainer, call = self._trainer, self._names.call
        try:
            args = self._unpacked()
        except Unpackable as error:
            rank_zero_warn(
                f"The batch in this checkpoint is not restored, because no class {error} is imported. Import its module."
            )
            args = None
        module: Any = trainer.lightning_module
        pending, own = self._pending(), bool(self._saved["module"])
        if args is None:
            pending = [c for c in pending if not self._wants_more(c.on_train_batch_end, 2)]
            own = own and not self._wants_more(module.on_train_batch_end, 0)
            args = (None, None, self._saved["batch_idx"])
        with calling_only(trainer, BATCH_END, pending, module=own):
            call._call_callback_hooks(trainer, BATCH_END, *args)
            call._call_lightning_module_hook(trainer, BATCH_END, *args)

    def _wants_more(self, fn: Any, before: int) -> bool:
        missing = self._saved["missing"]
        return callable(fn) and any(reads(fn, before + position) for position in missing)

    def _unpacked(self) -> tuple[Any, ...] | None:
        if self._saved["missing"] or self._arguments is None:
            return None if self._saved["missing"] else (None, None, self._saved["batch_idx"])
        return tuple(unpack(arg, self._trainer.strategy.root_device) for arg in self._arguments)

    @torch.no_grad()
    def _finish_validation(self) -> None:
        trainer, loop = self._trainer, self._epoch.val_loop
        module = trainer.lightning_module
        trainer.validating = True
        loop._has_run = True
        loop._module_mode.capture(module)
        module.eval()
        for name in self._saved["training"]:
            module.get_submodule(name).training = True
        if self._saved["hook"] == VALIDATION_EPOCH_END:
            self._in_validation(list(trainer.callbacks))
            with self._only(VALIDATION_EPOCH_END):
                loop.on_run_end()
        else:
            self._in_validation(self._pending())
            with self._only(VALIDATION_END):
                loop._on_evaluation_end()
            loop._on_evaluation_model_train()
            trainer._last_val_time = time.monotonic()
        trainer.training = True

    def _pending(self) -> list[Any]:
        return with_state_keys(self._trainer.callbacks, self._saved["pending"])

    def _only(self, hook: str) -> Any:
        return calling_only(self._trainer, hook, self._pending(), module=self._saved["module"])


def restarts_exactly(saved: dict[str, Any] | None) -> bool:
    """Return whether a fit can begin within the hook in which a checkpoint was saved."""
    exact = (EPOCH_START, BATCH_END, VALIDATION_EPOCH_END, VALIDATION_END, EPOCH_END, IN_VALIDATION)
    return saved is not None and saved["hook"] in exact
