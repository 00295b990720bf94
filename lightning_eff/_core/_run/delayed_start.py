"""Techniques that first act after some of a run's steps, and the warning where the run has not as many."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_eff._core.technique import Technique

_ROUNDING = 1e-6  # of a step


@dataclass(frozen=True)
class Length:
    """How long a run is, in optimizer steps.

    Attributes:
        steps: all of them; infinite where that is not known before its end.
        epoch: those of an epoch; infinite where the loader has no length.
    """

    steps: float
    epoch: float

    def first(self, every: float, start: float) -> int:
        """The first step that ``every`` divides, counted from 1, and that begins at ``start`` of the run or later."""
        return int(every * max(1, math.ceil((start * self.steps + 1 - _ROUNDING) / every)))

    def times(self, every: float, *, start: float = 0.0, until: float = 1.0) -> float:
        """How many steps ``every`` divides, counted from 1, that begin with ``start <= u < until``; infinite where unknown."""
        if math.isinf(every) or math.isinf(self.steps):
            return math.inf
        last = min(self.steps, math.ceil(until * self.steps - _ROUNDING))
        return max(0, (last - self.first(every, start)) // every + 1)


class ActsLate(Technique):
    """A technique that does what it is for after some of a run's steps, and warns where the run has not as many.

    It warns as training starts, where ``max_steps`` and ``max_epochs`` alone end the run; else as it ends.
    """

    _asks = False  # whether it is only as the run ends that it can be told

    @property
    @abstractmethod
    def acted(self) -> bool:
        """Whether it has done so by now, in what a checkpoint is of, too."""

    @abstractmethod
    def will_act(self, length: Length) -> bool:
        """Whether it will in a run of this length, or that is not known."""

    @abstractmethod
    def idle(self, length: Length) -> str:
        """For such a run: why it does not, what that means, and, as a sentence, which argument to set."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._asks = not (self.neutral or self.acted or getattr(trainer, "fast_dev_run", False))
        if not self._asks:
            return
        length = self._run_length(trainer)
        if math.isfinite(length.steps) and not self.will_act(length):
            rank_zero_warn(f"{type(self).__name__}: the run ends after {_steps(length)}, and {self.idle(length)}")
            self._asks = False
        elif math.isfinite(length.steps) and math.isfinite(length.epoch):  # a run that is stopped is not over
            self._asks = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._asks and not self.acted:
            length = Length(trainer.global_step, self._run_length(trainer).epoch)
            rank_zero_warn(f"{type(self).__name__}: the run ended after {_steps(length)}, and {self.idle(length)}")
        self._asks = False

    def _run_length(self, trainer: Trainer) -> Length:
        batches = trainer.num_training_batches
        known = math.isfinite(batches) and batches > 0
        epoch = math.ceil(batches / trainer.accumulate_grad_batches) if known else math.inf
        limits = self.session.progress.limits()
        if not limits or limits.keys() - {"max_steps", "max_epochs"}:
            return Length(math.inf, epoch)
        by_epochs = limits["max_epochs"] * epoch if "max_epochs" in limits and known else math.inf
        steps = min(limits.get("max_steps", math.inf), by_epochs)
        return Length(int(steps) if math.isfinite(steps) else steps, epoch)


def _steps(length: Length) -> str:
    return f"{length.steps:,} step{'s' if length.steps != 1 else ''}"
