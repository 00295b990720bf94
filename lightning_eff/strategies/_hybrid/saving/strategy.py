"""The part of the hybrid strategy that saves and loads one file, as in one process, or a folder of pieces."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._checkpoints.background import Saves, is_async
from lightning_eff._core._lightning.names import Connected, is_a, like, of_both
from lightning_eff.strategies._hybrid.layout import data_group

if TYPE_CHECKING:
    from lightning_eff.strategies._hybrid.replica import Replica
    from lightning_eff.strategies._hybrid.saving.files import Files

_KEY = "lightning_eff_hybrid"  # in checkpoints: the state of the random numbers of a pipeline's steps


@of_both
class SavingStrategy(Connected, ModelParallelStrategy):
    """Saves and loads the divided module, through its :class:`Replica` during the run, and after the run."""

    _replica: "Replica | None"
    _past: "tuple[Files, dict[str, Any]] | None" = None  # files and random state of the last run
    #: keys of the plain module's ``state_dict`` that a file skips, and whose tensors are not gathered
    leaves_out: frozenset[str] = frozenset()
    _saves: Saves | None = None  # in the background, in this run

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def _files(self) -> "Files":
        if self._replica is not None:
            return self._replica.files
        if self._past is None:
            raise RuntimeError(
                f"{type(self).__name__}: there is nothing to save yet, because no run has set up the module. Call"
                " trainer.save_checkpoint during a run or after it."
            )
        return self._past[0]

    def _draws(self) -> dict[str, Any]:
        """Return every replica's random state of the pipeline, or {} without a pipeline; collective in a run."""
        if self._replica is None:
            return {} if self._past is None else self._past[1]
        pipeline = self._replica.pipeline
        if pipeline is None:
            return {}
        state, group = pipeline.state_dict(), data_group(self.device_mesh)
        seeds: list[Any] = [None] * group.size()
        dist.all_gather_object(seeds, state["seed"], group=group)
        return {**state, "seeds": seeds}

    @property
    def saves_in_background(self) -> bool:
        """Whether folders of this run are written in a background thread, by ``AsyncCheckpointIO`` among the plugins."""
        fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return self._replica is not None and fitting and self._save_distributed_checkpoint and is_async(self)

    def _end_run(self, *, gather: bool | Literal["auto"], failed: bool) -> None:
        """Wait for saves, restore the plain module, and keep the state for checkpoints after the run."""
        saves, self._saves = self._saves, None
        try:
            if saves is not None:
                saves.close() if failed else saves.end()
        finally:
            self._restore_plain(gather=gather, failed=failed)

    def _restore_plain(self, *, gather: bool | Literal["auto"], failed: bool) -> None:
        replica, draws = self._replica, {} if failed else self._draws()
        if replica is None:
            return
        self._replica, self._past = None, None
        replica.undo(gather=False if failed else gather)
        if "files" in replica.__dict__:  # it was divided
            replica.files.end(why_gone=self._why_gone(gather, failed=failed))
            self._past = replica.files, draws

    def _why_gone(self, gather: bool | Literal["auto"], *, failed: bool) -> str | None:
        module, name = self.lightning_module, type(self).__name__
        gone = module is not None and any(p.is_meta for p in module.parameters())
        if failed and gone:
            return (
                f"{name}: no process has the whole weights after a failed run. Save during the run, for example with"
                " ModelCheckpoint(every_n_train_steps=100)."
            )
        if failed or self.reduce_boolean_decision(not gone):
            return None
        return (
            f"{name}(gather_after_fit={gather!r}): not every process has the whole weights after the run. Save during the run,"
            " for example with ModelCheckpoint(save_last=True), or set gather_after_fit=True."
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._save_distributed_checkpoint else self._files.state_dict(self.leaves_out)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return {}
        inner = optimizer._optimizer if is_a(optimizer, LightningOptimizer) else optimizer
        return self._files.optimizer_state(inner)

    def open_gradients(self) -> tuple[list[dict[str, Any]], list[str]] | None:
        """Return each replica's gradients of an open accumulation window, or None after the run; collective."""
        return None if self._replica is None else self._replica.window.collect()

    def take_up_gradients(self, replicas: list[dict[str, Any]], averaged: list[str]) -> None:
        """Restore the gradients from :meth:`open_gradients`; collective."""
        assert self._replica is not None
        self._replica.window.take_up(replicas, averaged)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if draws := self._draws():
            checkpoint[_KEY] = draws
        if not self._save_distributed_checkpoint:
            self._files.clear_way(Path(self.broadcast(filepath)))
            like(self, Strategy).save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__}.save_checkpoint(storage_options={storage_options!r}): torch.distributed.checkpoint,"
                " which writes folders of pieces, has no such options. Set save_distributed_checkpoint=False."
            )
        if self._saves is None and self.saves_in_background:
            assert self.lightning_module is not None
            self._saves = Saves(self.lightning_module.trainer)
        self._files.save(checkpoint, Path(self.broadcast(filepath)), self._saves)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._saves is None:
            super().remove_checkpoint(filepath)
        else:
            self._saves.remove(filepath, super().remove_checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self._replica is not None
        if self._saves is not None:
            self._saves.wait()
        checkpoint = self._replica.files.load(Path(self.broadcast(checkpoint_path)), weights_only, self.checkpoint_io)
        if self._replica.pipeline is not None and _KEY in checkpoint:
            state = dict(checkpoint[_KEY])
            seeds, group = state.pop("seeds", []), data_group(self.device_mesh)
            if len(seeds) == group.size():
                state["seed"] = seeds[group.rank()]
            self._replica.pipeline.load_state_dict(state)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self._replica is not None
        self._replica.files.load_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._replica is not None
        self._replica.files.load_optimizer_states(checkpoint)
