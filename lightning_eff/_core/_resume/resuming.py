"""The state of a run in a checkpoint besides weights and the techniques' own states, and how a resumed run restores it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_eff._core import rng
from lightning_eff._core._resume.fit import ResumedFit, restarts_exactly
from lightning_eff._core._resume.flags import Flags
from lightning_eff._core._resume.groups import AddedGroups
from lightning_eff._core._resume.logged_metrics import Metrics, load_logged, save_logged
from lightning_eff._core._resume.packing import Unpackable, pack
from lightning_eff._core._resume.position import (
    BATCH_END,
    EXACT,
    IN_VALIDATION,
    Position,
    current_position,
    keys,
    reads,
)
from lightning_eff._core._run.loading import TrainLoaders
from lightning_eff._core._run.processes import Saved, layout, log_other_replicas, replica, wrap_again
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.patches import Patches
from lightning_eff._core.progress import ends_batch, mend_loops, open_gradients, take_up

_SAVES = "Save in on_train_batch_end, on_validation_end or on_train_epoch_end, as ModelCheckpoint does."


class Resume:
    """The state of a run that neither Lightning nor a technique saves.

    Args:
        trainer: the trainer.
        module: its module.
        gather: returns ``value`` of every rank, in rank order, on every rank.

    Attributes:
        loaders: the training loaders; set once they exist.
        state: the loaded state until it is restored.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, gather: Callable[[Any], list[Any]]) -> None:
        self._trainer, self._module, self._gather = trainer, module, gather
        self.loaders: TrainLoaders | None = None
        self.state: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._rng: dict[str, Any] | None = None
        self._flags: Flags | None = None
        self._metrics: Metrics | None = None
        self._groups: AddedGroups | None = None
        self._exactly = False
        self._taken_up: Callable[[dict[str, Any], bool], None] = lambda state, exactly: None
        self._said: set[str] = set()

    # -- saving

    def save(
        self, checkpoint: dict[str, Any], *, stepped: bool, backward_done: bool, session: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state for :meth:`load`; ``checkpoint`` keeps what a plain Trainer needs to resume.

        Args:
            checkpoint: Lightning's checkpoint.
            stepped: whether an optimizer stepped since the last batch began.
            backward_done: whether the backward pass of the current batch has ended.
            session: the state that the session itself restores.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        assert self.loaders is not None
        gradients = open_gradients(
            trainer, self._module, stepped=stepped, backward_done=backward_done, gather=self._gather
        )
        fetcher = loop._data_fetcher if ends_batch(trainer) else None
        position = current_position(trainer)
        self._warn(position)
        arguments, missing = self._pack_arguments(position)
        own = {"logged": save_logged(trainer), "metrics": self._metrics.state_dict() if self._metrics else {}}
        return {
            "session": session,
            "rng": self._gather(rng.capture()),
            "layout": layout(trainer, self._gather),
            **gradients,
            "window": trainer.accumulate_grad_batches,
            "loaders": self.loaders.states_in(checkpoint["loops"]["fit_loop"]["state_dict"]),
            "validate_first": fetcher is not None and bool(loop.epoch_loop._should_check_val_fx(fetcher)),
            "position": None if position is None else self._describe(position, missing),
            "own": self._gather({**own, "arguments": arguments}),
            "flags": self._flags.state_dict(self._outside_validation()) if self._flags else None,
            "groups": self._groups.state_dict() if self._groups else [],
            "stopped": self._stopped(),
            "checkpoints": self._checkpoints(position),
            "reloaded": [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch],
            "validation_seeds": [getattr(s, "seed", None) for s in _samplers(loop.epoch_loop.val_loop)],
            "seen": dict(loop.epoch_loop.val_loop._seen_batches_per_dataloader),
        }

    def _describe(self, position: Position, missing: list[int]) -> dict[str, Any]:
        modules = self._module.named_modules() if self._trainer.validating else ()
        return {
            "hook": position.hook,
            "pending": keys(position.pending),
            "module": position.module_pending,
            "batch_idx": self._trainer.fit_loop.epoch_loop.batch_idx,
            "missing": missing,
            "training": [name for name, module in modules if module.training],
        }

    def _pack_arguments(self, position: Position | None) -> tuple[list[Any] | None, list[int]]:
        """Return the packed arguments of the hooks still due at the end of a batch, and the positions that cannot be packed."""
        if position is None or position.hook != BATCH_END:
            return None, []
        hooks = [*zip(position.pending, [2] * len(position.pending), strict=True)]
        if position.module_pending:
            hooks.append((self._module, 0))
        packed: list[Any] = list(position.args)
        missing: list[int] = []
        for index, value in enumerate(position.args):
            fns = [(owner, getattr(owner, BATCH_END, None), first + index) for owner, first in hooks]
            readers = [owner for owner, fn, at in fns if callable(fn) and reads(fn, at)]
            try:
                packed[index] = pack(value) if readers else None
            except Unpackable as error:
                packed[index] = None
                missing.append(index)
                self._warn_unpackable(readers[0], error)
        packed[-1] = position.args[-1]
        return packed, missing

    def _warn_unpackable(self, reader: Any, error: Unpackable) -> None:
        name = type(reader).__name__
        self._say(
            f"{name}.on_train_batch_end: a resumed run skips this call for the batch at which the checkpoint was saved,"
            f" because a checkpoint cannot hold the {error} that it reads. Save in on_validation_end or"
            " on_train_epoch_end instead, or let the batch be tensors in lists, tuples, dicts or dataclasses."
        )

    def _warn(self, position: Position | None) -> None:
        if position is None or position.hook in EXACT:
            return
        if position.hook == IN_VALIDATION:
            self._say(
                f"This checkpoint is saved in {position.called_in}, while validation is under way: a resumed run begins that"
                f" validation again, with other random numbers. {_SAVES}"
            )
        elif position.called_in not in ("on_train_start", "on_train_end"):
            self._say(
                f"This checkpoint is saved in {position.called_in}, while a step is under way: a resumed run trains on its"
                f" batch again, with other random numbers. {_SAVES}"
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_warn(text)

    def _outside_validation(self) -> dict[str, bool] | None:
        return self._trainer.fit_loop.epoch_loop.val_loop._module_mode.mode if self._trainer.validating else None

    def _stopped(self) -> bool:
        """Return whether an ``EarlyStopping`` ended this run, so that a resumed run ends here too."""
        return self._trainer.should_stop and self._ended_early()

    def _ended_early(self) -> bool:
        reasons = (getattr(c, "stopping_reason", None) for c in self._trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        return any(getattr(reason, "value", 0) for reason in reasons)

    def _checkpoints(self, position: Position | None) -> dict[str, Any]:
        """Return what ``ModelCheckpoint`` omits from its state: its last save, and whether it waits for validation."""
        saver = None if position is None else position.saver
        return {
            callback.state_key: [
                self._trainer.global_step if callback is saver else getattr(callback, "_last_global_step_saved", 0),
                bool(getattr(callback, "_defer_save_until_validation", False)),
            ]
            for callback in self._trainer.checkpoint_callbacks
            if hasattr(callback, "_last_global_step_saved")
        }

    # -- resuming

    def mend(self, checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
        """Repair Lightning's counts if a fit cannot begin within the hook in which the checkpoint was saved."""
        if state and not self._exact(state):
            window = state.get("window", self._trainer.accumulate_grad_batches)
            mend_loops(checkpoint, by_steps=self._trainer.max_steps != -1, accumulate=window)

    def _exact(self, state: dict[str, Any]) -> bool:
        return self._predecessor(state).rank is not None and restarts_exactly(state.get("position"))

    def _predecessor(self, state: dict[str, Any]) -> Saved:
        return Saved(state.get("layout", {}), self._trainer, len(state["rng"]))

    def load(self, checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
        """Take the state that :meth:`save` returned."""
        assert self.loaders is not None
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # included in our states
        predecessor = self._predecessor(state)
        rank = predecessor.rank
        if rank is None:
            log_other_replicas(predecessor.replicas, replica(self._trainer)[1])
            return
        self.state = state
        self._rng = state["rng"][rank]
        self._own = state["own"][rank] if "own" in state else {}  # checkpoints of earlier versions have none
        self._exactly = self._exact(state)
        self.loaders.take_up(state["loaders"], rank)

    def attach(
        self,
        patches: Patches,
        in_validation: Callable[[list[Any]], None],
        taken_up: Callable[[dict[str, Any], bool], None],
    ) -> None:
        """Make the fit loop begin where the checkpoint was saved.

        Args:
            patches: undone at the end.
            in_validation: called before the rest of a validation, with callbacks whose ``on_validation_end`` is still due.
            taken_up: called with the session's own state, and whether the fit begins within a hook.
        """
        self._taken_up = taken_up
        loop = self._trainer.fit_loop
        run, start, load = loop.run, loop.on_run_start, loop.load_state_dict

        def load_state_dict(*args: Any, **kwargs: Any) -> None:
            load(*args, **kwargs)
            if self._exactly:  # no sanity check, which would call hooks again
                loop.epoch_loop.val_loop._restarting = True

        def run_on() -> None:
            if not self.state or not self._exactly:
                return run()
            return ResumedFit(self._trainer, self.state["position"], self._own.get("arguments"), in_validation).run()

        def on_run_start() -> None:
            start()
            self._begin()

        patches.set(loop, "load_state_dict", load_state_dict)
        patches.set(loop, "run", run_on)
        patches.set(loop, "on_run_start", on_run_start)

    def start(self, stacks: Collection[BlockStack]) -> None:
        """Record the state at the start of training, before any hook changes it.

        Args:
            stacks: the blocks that techniques freeze for a while.
        """
        self._flags, self._metrics = Flags(self._trainer, self._module, stacks), Metrics(self._module)

    def set_up(self, optimizers: Sequence[Optimizer]) -> None:
        """Add missing groups when the optimizers are built, before their state is loaded."""
        self._groups = AddedGroups(self._module, optimizers)
        if self.state.get("groups"):
            self._groups.load_state_dict(self.state["groups"], self._trainer)

    def take_up_rng(self) -> None:
        """Restore the random state again, because other hooks may have drawn numbers."""
        if self._rng is not None:
            rng.restore(self._rng)
            if not (self.state and self._exactly):
                self._rng = None

    def _begin(self) -> None:
        """Restore everything else on resume, after all hooks of the run's start."""
        state, self.state = self.state, {}
        assert self.loaders is not None
        if not state:
            return
        trainer = self._trainer
        self._take_up_own(state)
        take_up(trainer, self._module, state.get("gradients", []), state.get("averaged", []), count=not self._exactly)
        if "session" in state:
            self._taken_up(state["session"], self._exactly)
        if self._rng is not None:
            rng.restore(self._rng)
        if self._exactly:
            self._rng = None
        elif state["validate_first"]:
            loop = trainer.fit_loop.epoch_loop.val_loop
            trainer.validating = True
            loop.restarting = False
            loop.run()
            trainer.training = True
            if self._rng is not None:
                self._rng = rng.capture()

    def _take_up_own(self, state: dict[str, Any]) -> None:
        if not self._own:
            return
        trainer, loop = self._trainer, self._trainer.fit_loop
        device = trainer.strategy.root_device
        assert self._flags is not None
        assert self._metrics is not None
        if state["flags"] is not None and self._flags.load_state_dict(state["flags"]):
            wrap_again(trainer, self._module)
        load_logged(trainer, self._module, self._own["logged"])
        self._metrics.load_state_dict(self._own["metrics"], device)
        self._own = {}
        if state["stopped"] and self._ended_early():
            trainer.should_stop = True
        for callback in trainer.checkpoint_callbacks:
            if (saved := state["checkpoints"].get(callback.state_key)) is not None:
                owner: Any = callback
                owner._last_global_step_saved, owner._defer_save_until_validation = saved
        loop._last_train_dl_reload_epoch = state["reloaded"][0]
        self._take_up_validation(loop.epoch_loop.val_loop, state)

    def _take_up_validation(self, loop: Any, state: dict[str, Any]) -> None:
        if not state["seen"] and not any(seed is not None for seed in state["validation_seeds"]):
            return
        if loop._combined_loader is None:
            self._trainer.validating = True
            loop.setup_data()
            self._trainer.training = True
        if loop._combined_loader is not None:
            loop._last_val_dl_reload_epoch = state["reloaded"][1]
            loop._seen_batches_per_dataloader.update(state["seen"])
            for sampler, seed in zip(_samplers(loop), state["validation_seeds"], strict=False):
                if seed is not None:  # a distributed sampler, which Lightning seeds from the process's seed
                    sampler.seed = seed


def _samplers(loop: Any) -> list[Any]:
    """Return the samplers of the loop's loaders; empty before it has any."""
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    batched = [getattr(loader, "batch_sampler", None) for loader in loaders]
    return [getattr(b, "sampler", getattr(loader, "sampler", None)) for loader, b in zip(loaders, batched, strict=True)]
