"""Problems of a training run, found by watching some real steps."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a, of_both
from lightning_eff._core.batches import tensors
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import Patches
from lightning_eff.advice._looking import modes
from lightning_eff.advice._looking.clock import Times
from lightning_eff.advice._looking.concluding import NOT_FINITE as NOT_FINITE
from lightning_eff.advice._looking.concluding import became_not_finite as became_not_finite
from lightning_eff.advice._looking.concluding import conclude
from lightning_eff.advice._looking.frames import owner, package_of
from lightning_eff.advice._looking.logged import Logged
from lightning_eff.advice._looking.operations import Operations
from lightning_eff.advice._looking.padding import padded, wide
from lightning_eff.advice._looking.parameters import Gradients
from lightning_eff.advice._looking.problem import Problem as Problem
from lightning_eff.advice._looking.rates import follow, planned, written_by_hand
from lightning_eff.advice._looking.watched import NotFinite, Watched

_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)
_NOT_THEIRS = ("lightning", "torch", "ours", "python")
CLOSELY = 6  # steps that are watched operation by operation; later ones are timed


@of_both
class Problems(Callback):
    """Watch a run of real training steps for problems, and change nothing.

    No number, buffer, mode or random state differs from a run without it. The first steps are watched operation by operation,
    which makes them several times slower. Later ones are timed, so train at least twice as many. Validation is timed
    wherever the trainer runs it, in the sanity check too.

    Args:
        optimizer_steps: steps of the whole planned run, for schedules. Default: the trainer's.
        validation_batches: batches of one validation of the planned run. Default: the trainer's.
        validate_every: training batches from one validation to the next in the planned run. Default: the trainer's.
        progress_bar_rate: batches from one refresh of the planned run's progress bar to the next, 0 without a bar.
            Default: the trainer's.
        log_every_n_steps: steps from one row of the planned run's logger to the next, 0 without a logger. Default: the
            trainer's.
        find_unused_parameters: whether DDP searches for unused parameters in the planned run. Default: the trainer's.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> problems = Problems()
        >>> trainer = Trainer(max_steps=16, callbacks=problems, logger=False)
    """

    def __init__(
        self,
        *,
        optimizer_steps: int | None = None,
        validation_batches: int | None = None,
        validate_every: int | None = None,
        progress_bar_rate: int | None = None,
        log_every_n_steps: int | None = None,
        find_unused_parameters: bool | None = None,
    ) -> None:
        self._steps = optimizer_steps
        self._batches, self._every = validation_batches, validate_every
        self._bar, self._log = progress_bar_rate, log_every_n_steps
        self._unused = find_unused_parameters
        self._patches = Patches()
        self._seen: Watched | None = None
        self._operations: Operations | None = None
        self._logged = Logged()

    @property
    def trained(self) -> bool:
        """Whether it saw a training step."""
        return self._seen is not None and self._seen.steps > 0

    def problems(self) -> list[Problem]:
        """The problems that were found, the worst first."""
        return [] if self._seen is None else conclude(self._seen)

    # -- the run

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device, own = trainer.strategy.root_device, package_of(pl_module)
        self._seen = seen = Watched(trainer, pl_module, device, own, Times(device))
        names = {id(module): path for path, module in pl_module.named_modules()}
        self._operations = Operations(names, own, on_cpu=device.type == "cpu")
        self._operations.on_backward = self._after_engine
        self._logged = Logged()
        bar = trainer.progress_bar_callback
        shown = 0 if bar is None else int(getattr(bar, "refresh_rate", 1))
        seen.bar_rate = shown if self._bar is None else self._bar
        written = trainer.log_every_n_steps if trainer.loggers else 0  # pyright: ignore[reportAttributeAccessIssue]
        seen.log_rate = written if self._log is None else self._log
        self._patches.restore()
        strategy = trainer.strategy
        self._patches.set(strategy, "training_step", self._train(strategy.training_step))
        self._patches.set(strategy, "validation_step", self._validate(strategy.validation_step))
        searches = is_a(strategy, DDPStrategy) and getattr(strategy, "_ddp_kwargs", {}).get("find_unused_parameters")
        seen.searches_unused = bool(searches) if self._unused is None else self._unused
        every: list[Any] = [pl_module, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
        for one in every:
            for name in _HOOKS:
                file = _file(one, name)
                if one is not self and file and owner(file) not in _NOT_THEIRS:
                    self._patches.set(one, name, self._within_step(getattr(one, name)))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = self._watched
        seen.gradients = Gradients(pl_module)
        seen.planned = planned(trainer, self._steps)
        seen.rates = follow(trainer, pl_module, self._steps)
        batches, every = validations(trainer)
        seen.validation_batches = batches if self._batches is None else self._batches
        seen.validate_every = every if self._every is None else self._every
        theirs = [c for c in trainer.callbacks if c is not self]  # pyright: ignore[reportAttributeAccessIssue]
        seen.by_hand = written_by_hand(pl_module, theirs)

    @property
    def _watched(self) -> Watched:
        assert self._seen is not None
        return self._seen

    def _train(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(*args: Any, **kwargs: Any) -> Any:
            seen = self._watched
            seen.steps += 1
            if seen.steps > CLOSELY:
                with seen.times.metrics_of_a_step(seen.own):
                    output = step(*args, **kwargs)
            else:
                output = self._closely(step, args, kwargs)
            seen.anomaly |= torch.is_anomaly_enabled()
            seen.deterministic |= torch.are_deterministic_algorithms_enabled()
            loss = loss_of(output) if seen.module.automatic_optimization else None
            if isinstance(loss, Tensor):
                seen.no_graph += not loss.requires_grad
                self._check(loss)
            return output

        return training_step

    def _closely(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One step, operation by operation."""
        seen, operations = self._watched, self._operations
        assert operations is not None
        module = seen.module
        held = [t for _, t in tensors(args)] + [t for _, t in tensors(kwargs)]
        with operations.step([*module.parameters(), *module.buffers(), *held]) as one:
            output = step(*args, **kwargs)
        one.conclude(loss_of(output) if module.automatic_optimization else None)
        seen.close.append(one)
        seen.asleep.update(modes.asleep(module, {n for n, p in module.named_parameters() if p.requires_grad}))
        if args:
            pad, total = padded(args[0], one.looked_up)
            seen.padding = (seen.padding[0] + pad, seen.padding[1] + total)
            seen.wide |= set(wide(args[0], one.used))
        return output

    def _within_step(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of the user's own code around a step. The waits in it count for the step before it."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen, operations = self._watched, self._operations
            if operations is None or not seen.close or seen.steps > CLOSELY:
                return hook(*args, **kwargs)
            given = [t for value in (*args, *kwargs.values()) for _, t in tensors(value)]
            held = [*seen.module.parameters(), *seen.module.buffers(), *given]
            held += [p.grad for p in seen.module.parameters() if p.grad is not None]
            with operations.step(held, within=seen.close[-1]):
                return hook(*args, **kwargs)

        return call

    def _validate(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def validation_step(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self._watched.validated += 1
            self._watched.awake.update(modes.awake(self._watched.module))
            return output

        return validation_step

    def _check(self, loss: Tensor) -> None:
        """Whether a loss is a number."""
        seen = self._watched
        if seen.not_finite is not None or not loss.is_floating_point() or bool(loss.detach().isfinite().all()):
            return
        nan = bool(loss.detach().isnan().any())
        ours = self._operations.seen if self._operations is not None and seen.steps <= CLOSELY else None
        origin = None if ours is None else (ours.nan or ours.infinite if nan else ours.infinite)
        weights = [name for name, p in seen.module.named_parameters() if p.is_floating_point() and not _finite(p)]
        seen.not_finite = NotFinite(seen.steps, "NaN" if nan else "infinite", origin, weights)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._check(loss)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look_at_gradients()

    def _after_engine(self) -> None:
        if not self._watched.module.automatic_optimization:  # its backward passes need not go by way of Lightning
            self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        if self._watched.gradients is not None:
            self._watched.gradients.look()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        seen = self._watched
        seen.updates += 1
        if seen.gradients is not None:
            seen.gradients.look_for_zeros()

    # -- time

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watched.times.interrupt()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._watched.times.begin_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seen = self._watched
        bar, log = self._logged.of_a_step(trainer)
        seen.bar.update(bar)
        seen.log.update(log)
        seen.times.end_step(close=seen.steps <= CLOSELY)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._seen is not None:  # validation alone is no run of training
            self._seen.times.interrupt()

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._seen is not None:
            self._seen.times.begin_validation_batch()

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
        if self._seen is not None:
            self._seen.times.end_validation_batch()

    # -- the end

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patches.restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._patches.restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()


def validations(trainer: Trainer) -> tuple[int | None, int | None]:
    """The batches of a validation, and training batches from one to the next; None where the trainer cannot know."""
    batches, every = sum(trainer.num_val_batches), trainer.val_check_batch  # pyright: ignore[reportAttributeAccessIssue]
    between = every * (trainer.check_val_every_n_epoch or 1) if every is not None else math.inf
    return (int(batches) if math.isfinite(batches) else None), (int(between) if math.isfinite(between) else None)


def _file(of: Any, method: str) -> str:
    """The file that defines a method; "" if it cannot be known."""
    found = getattr(type(of), method, None)
    code = None if found is None else getattr(inspect.unwrap(found), "__code__", None)
    return "" if code is None else code.co_filename


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
