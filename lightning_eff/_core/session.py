"""One run of a trainer as the techniques see it. The first technique opens it, and it closes when the run ends or fails."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core import rng
from lightning_eff._core._architecture.record import check_checkpoint, described
from lightning_eff._core._checkpoints.background import LightningSaves
from lightning_eff._core._needs.parts import Parts
from lightning_eff._core._optim.external_rates import look
from lightning_eff._core._resume.resuming import Resume
from lightning_eff._core._run._muting.idle_hooks import silence
from lightning_eff._core._run.checks import check_optimizers, check_run, log_trials
from lightning_eff._core._run.loading import TrainLoaders
from lightning_eff._core._run.metrics import CurrentMetrics, reported
from lightning_eff._core._run.processes import wrap_again
from lightning_eff._core._run.protocol import Member
from lightning_eff._core._run.replicas import Replicas
from lightning_eff._core._samples.counting import Counting, counted, using
from lightning_eff._core._samples.handed import Handed
from lightning_eff._core._stack.registry import Stacks
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core.batches import tensors
from lightning_eff._core.patches import Patches, Scope
from lightning_eff._core.progress import Progress
from lightning_eff._core.steps import Step, StepChain
from lightning_eff._core.surgery import Surgery

_KEY = "lightning_eff"
_OPEN: "WeakKeyDictionary[Trainer, Session]" = WeakKeyDictionary()


def is_open(trainer: Trainer) -> bool:
    """Return whether a run of this trainer with techniques is in progress."""
    return trainer in _OPEN


class Session(Stacks, Parts):
    """The state that techniques share in one run.

    Attributes:
        trainer: the trainer.
        module: the LightningModule, unwrapped.
        techniques: all techniques among the trainer's callbacks, in order.
        working: those that are neither neutral nor called :meth:`rest`, initializations first. The others are not called.
        progress: the fraction of the budget that is used.
        chain: the links around ``training_step``.
        surgery: submodule replacements, undone at the end.
        patches: attribute replacements, undone at the end.
        loaders: the wrapped training loaders.
        views: contexts, ``view(training)``, around each step through its backward pass, and around evaluation steps.
        sizes: further factors of a step's cost by name, each as a pair (used, total).
        seed: the seed of keyed draws, the same on all ranks and after a resume.
        rank: the index of this process's data-parallel replica. Processes that share a replica draw the same numbers.
        replicas: the replicas of the module, and the communication between processes.
        fitting: False in validate, test and predict.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, techniques: Sequence[Member], stage: str) -> None:
        self.trainer = trainer
        self.take_module(module, sizes={}, fitting=stage == "fit")
        self.techniques = list(techniques)
        self.working = sorted((t for t in techniques if not t.neutral), key=lambda t: not t.initializes)
        self.progress, self.replicas = Progress(trainer), Replicas(trainer)
        # if a strategy runs the module's step on parts of a batch, techniques get the whole batch before it is divided
        self._stepping: Any = trainer.strategy if getattr(trainer.strategy, "splits_batches", False) else module
        look = trainer.strategy.forward_step if self.divided else None  # pyright: ignore[reportAttributeAccessIssue]
        self.chain = StepChain(self._stepping.training_step, look)
        self.handed, self._told = Handed(type(module).__name__), []
        self.surgery, self.patches, self._saves = Surgery(), Patches(), LightningSaves(trainer)
        self.seed, self._steps_before = 0, -1
        self.rank, self._metrics = self.replicas.index, None
        self.views: list[Callable[[bool], AbstractContextManager[None]]] = []
        self.resume = Resume(trainer, module, self.replicas.everyone)
        self.loaders = self.resume.loaders = TrainLoaders(trainer, self.replicas.everyone, self.resume.take_up_rng)
        self._scope = Scope()
        self._backward_done = self._logged = self._reports = self._slept = self._batch_ended = False

    # -- opening and closing

    @classmethod
    def open(cls, trainer: Trainer, module: LightningModule, techniques: Sequence[Member], stage: str) -> None:
        """Open the session of this run, unless another technique of the trainer has done so.

        Raises:
            ValueError: if a technique cannot work in this run, or two conflict. Nothing is left changed.
        """
        if trainer in _OPEN and _OPEN[trainer].techniques[0]._session is _OPEN[trainer]:
            return
        session = cls(trainer, module, techniques, stage)
        _OPEN[trainer] = session
        for technique in techniques:
            technique._session = session
        try:
            if session.fitting:
                session._check()
                session._attach()
            session._patch()
        except BaseException:
            session.close(failed=True)
            raise

    def close(self, *, failed: bool = False) -> None:
        """Undo all changes. A second call does nothing."""
        self._saves.close()
        self._scope.close()
        if self._metrics is not None:
            self._metrics.remove(keep=self._reports and not failed)
            self._metrics = None
        for technique in self.techniques:
            if technique._session is self:
                technique.detach(self)
        self.patches.restore()
        self.surgery.restore()
        self.release_blocks()
        self.loaders.unwrap()
        for technique in self.techniques:
            if technique._session is self:
                technique._session, technique._past = None, self
        if _OPEN.get(self.trainer) is self:
            del _OPEN[self.trainer]

    def _check(self) -> None:
        for technique in self.working:
            technique.on_budget(self)
        working = [t for t in self.techniques if not t.neutral]
        check_run(self.trainer, self.module, working, has_end=bool(self.progress.limits()))
        self.seed = self.trainer.strategy.broadcast(torch.initial_seed() % 2**63)
        for technique in self.working:
            technique.check(self)

    def _attach(self) -> None:
        self._saves.begin(self.patches)
        for technique in self.working:
            technique._reset()
            technique.attach(self)

    def _patch(self) -> None:
        strategy, module = self.trainer.strategy, self.module
        setup, load = strategy.setup, strategy.load_checkpoint

        def setup_strategy(trainer: Trainer) -> None:
            for technique in sorted(self.working, key=lambda t: not t.compiles):  # some may rest
                technique.on_model(self)
                self.thaw_blocks()
            if self.fitting:
                self.freeze_blocks()
            learnt = [(stack, stack.state_dict()) for stack in self._stacks.values()]
            setup(trainer)
            if self.divided and self.fitting:
                self.check_verified(trainer.strategy)
                self.begin_telling()
            for stack, state in learnt:  # a strategy may run steps during setup, without techniques
                stack.load_state_dict(state)
            if self.fitting:
                check_optimizers(module, self.optimizers, self.working)
                self.thaw_blocks()
                for technique in self.working:
                    technique.on_optimizers(self)
                self.resume.set_up(self.optimizers)
                self.thaw_blocks()
                self._settle()

        def load_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            checkpoint = load(*args, **kwargs)
            ours, states = checkpoint.get(_KEY, {}), checkpoint.get("callbacks", {})
            if self.fitting:
                self.resume.mend(checkpoint, ours)
            check_checkpoint(self.module, checkpoint.get("state_dict"), ours.get("architecture", []))
            for technique in self.working:
                technique.check_checkpoint(self, states.get(technique.state_key))
            return checkpoint

        self.patches.set(strategy, "setup", setup_strategy)
        self.patches.set(strategy, "load_checkpoint", load_checkpoint)
        for name in ("validation_step", "test_step", "predict_step"):
            self.patches.set(module, name, self._evaluation(getattr(module, name)))
        if self.fitting:
            self._metrics = CurrentMetrics(self.trainer, self._reported)
            loop = self.trainer.fit_loop
            self.resume.attach(self.patches, self._in_validation, self._taken_up)
            self.patches.set(loop, "setup_data", self.loaders.asking(loop.setup_data))
            self.patches.set(loop.epoch_loop, "on_run_start", self.loaders.beginning(loop.epoch_loop.on_run_start))
            self.patches.set(strategy, "process_dataloader", self.loaders.wrap(strategy.process_dataloader))
            self.chain.original = self.handed.around(self.standing(self.chain.original))
            step = self._training(self.standing(self._stepping.training_step))
            self.patches.set(self._stepping, "training_step", step)
            if self.divided:
                step = self.verifying_whole(self.chain.of_parts(module.training_step))
                self.patches.set(module, "training_step", step)
            self.patches.set(loop, "run", self._counted(loop.run))
            self.patches.set(module, "configure_optimizers", thawing(module.configure_optimizers, self._stacks))
        for technique in self.working:
            technique.on_open(self)

    def _settle(self) -> None:
        """Release the stacks if no technique works in this fit, and disable hooks that do nothing."""
        if not self.working:
            self.release_blocks()
        silence(self.trainer, self.module, self.techniques, self.working, self.patches)

    def _counted(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the fit loop's ``run`` so that samples are counted by what this run knows of its batches."""

        def counted_run() -> Any:
            with using(Counting()):
                return run()

        return counted_run

    # -- the module's own methods, wrapped

    def _training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not self.working or self.asleep or self._evaluating() or not (args and self.loaders.started):
                if self.working and self.asleep and not self._slept:
                    self._slept = True
                    log_trials(self.working)
                return original(*args, **kwargs)
            self.end_step()
            self._show(self._scope, training=True)
            try:
                if self.chain.links:
                    batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
                    indices = self.sample_indices if isinstance(self.sample_indices, list) else None
                    step = Step(self.chain, self.module, args[1:], batch_idx, self.trainer.global_step, indices)
                    output = counted(self.module, tensors(args[0]), indices, lambda: self.chain.run(step, args[0]))
                else:
                    output = self.chain.original(*args, **kwargs)
            except Exception as error:
                missing = self.missing_blocks()
                self.end_step()
                if not self.divided:  # one rank alone cannot run a pass of a pipeline
                    self.explain(error, missing, lambda: original(*args, **kwargs))
                raise
            self.handed.settle(args[0])
            self.verify(output)
            if output is None or not self.module.automatic_optimization:
                self.end_step()  # no backward pass follows that would end it
            return output

        training_step.__wrapped__ = inspect.unwrap(original)  # Lightning unwraps only once
        return training_step

    def _evaluation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluation_step(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as scope:
                self._show(scope, training=False)
                output = original(*args, **kwargs)
            for stack in self._stacks.values():
                stack.look()
            return output

        evaluation_step.__wrapped__ = inspect.unwrap(original)  # pyright: ignore[reportAttributeAccessIssue]
        return evaluation_step

    def _show(self, scope: ExitStack, *, training: bool) -> None:
        for stack in self._stacks.values():
            scope.enter_context(stack.view(training=training))
        for view in self.views:
            scope.enter_context(view(training))

    @property
    def asleep(self) -> bool:
        """Whether Lightning's tuners have replaced the callbacks for their trial runs, which then train plainly."""
        return self.techniques[0] not in self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]

    def _evaluating(self) -> bool:
        """Return whether the module evaluates with its own training_step, which must then run plainly."""
        return bool((stage := self.trainer.state.stage) and stage.evaluating)

    # -- the interface for techniques

    @property
    def optimizers(self) -> list[Optimizer]:
        """The run's torch optimizers, without Lightning's wrappers."""
        return [getattr(o, "_optimizer", o) for o in self.trainer.strategy.optimizers]

    def rest(self, technique: Member) -> None:
        """Stop calling ``technique``, whose settings mean plain training on this module. For :meth:`Technique.on_model`."""
        self.working.remove(technique)

    def rewrap(self) -> None:
        """Wrap the module in DDP again after ``requires_grad`` changed; without this, ranks would silently diverge."""
        wrap_again(self.trainer, self.module)

    def blocks_changed(self, by: Member) -> None:
        """Notify the other techniques that ``by`` changed which blocks the network has."""
        for technique in self.working:
            if technique is not by:
                technique.on_blocks_changed(self)

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every replica of the module, in order, on every process."""
        return self.replicas.gather(value)

    def generator(self, *key: int | str) -> torch.Generator:
        """Return a generator whose numbers depend only on the run's seed and ``key``."""
        return rng.keyed_generator(self.seed, *key)

    @property
    def sample_indices(self) -> Any:
        """The data set indices of the current batch's samples (a list), or None if the loader does not provide them."""
        return self.loaders.indices

    @property
    def sample_weights(self) -> Tensor | None:
        """The weights that a technique chose for the current batch's samples, (B,); None if no technique did."""
        return self.loaders.weights

    def epoch_complete(self) -> bool:
        """Return whether the last batch of the epoch has been trained on."""
        return self.loaders.epoch_complete()

    # -- the events of the run, called by the first technique's hooks

    def start(self) -> None:
        """Freeze the blocks that do not run yet. A resumed run restores the rest after all start hooks."""
        self.resume.start(self._stacks.values())
        self.freeze_blocks()
        self.loaders.started = True

    def _taken_up(self, state: dict[str, Any], exactly: bool) -> None:
        """Restore the state that :meth:`save` stored for this object."""
        self.progress.u, self._logged = state["u"], state["logged"]
        self._batch_ended = exactly and state["batch_ended"]

    def _in_validation(self, pending: list[Any]) -> None:
        for technique in self.working:
            if any(technique is callback for callback in pending):
                technique.on_rest_of_validation(self)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        self.end_step()
        self._backward_done = self._batch_ended = False
        self._steps_before = self.trainer.global_step
        self.progress.update(batch_idx)
        for technique in self.working:
            technique.on_batch_start(self, batch, batch_idx)

    def when_step_ends(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once when this step ends: after its backward pass, without one, or after an exception."""
        self._scope.callback(fn)

    def end_step(self) -> None:
        """End the step after its backward pass, if it has one, and show the whole module again."""
        self._scope.close()
        for stack in self._stacks.values():
            stack.look()

    def after_backward(self) -> None:
        """Note the end of a backward pass that Lightning runs."""
        self._backward_done = True
        self.end_step()

    def end_batch(self, batch_idx: int) -> None:
        if self._batch_ended:
            return  # this ran before the checkpoint was saved
        self._batch_ended = True
        self.end_step()
        for technique in self.working:
            technique.on_batch_end(self, batch_idx)
        look(self.optimizers)
        self.outdate()
        self._log()

    def outdate(self) -> None:
        """Mark the techniques' reported metrics as outdated."""
        if self._metrics is not None:
            self._metrics.outdate()

    def _log(self) -> None:
        trainer = self.trainer
        self._reports = True
        if self._logged and not (trainer._logger_connector.should_update_logs or trainer.is_last_batch):
            return
        self._logged = True
        metrics = self._reported()
        if metrics:
            self.module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def _reported(self) -> dict[str, float]:
        """Return the techniques' metrics, once there has been a batch."""
        return reported(self.working) if self._reports else {}

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the state for a bit-exact resume to a checkpoint, apart from the techniques' own states."""
        if not self.fitting:
            return
        stepped = self.trainer.global_step != self._steps_before
        session = {"u": self.progress.u, "logged": self._logged, "batch_ended": self._batch_ended}
        rest = self.resume.save(checkpoint, stepped=stepped, backward_done=self._backward_done, session=session)
        checkpoint[_KEY] = {
            **rest,
            "seed": self.seed,
            "cost": self.chain.cost.state_dict(),
            "architecture": described(self.module),
        }

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state that :meth:`save` added to a checkpoint."""
        state = checkpoint.get(_KEY)
        if not self.fitting or state is None or "seed" not in state:  # merged checkpoints have no seed
            return
        self.seed = state["seed"]
        self.chain.cost.load_state_dict(state["cost"])
        self.resume.load(checkpoint, state)
