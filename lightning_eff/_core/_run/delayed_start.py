"""Techniques that first act after some steps, and the warning for runs that are too short."""

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
    """The length of a run in optimizer steps.

    Attributes:
        steps: steps of the run; infinite if unknown before its end.
        epoch: steps per epoch; infinite if the loader has no length.
    """

    steps: float
    epoch: float

    def first(self, every: float, start: float) -> int:
        """Return the first step, counted from 1, that ``every`` divides and that begins at progress ``start`` or later."""
        return int(every * max(1, math.ceil((start * self.steps + 1 - _ROUNDING) / every)))

    def times(self, every: float, *, start: float = 0.0, until: float = 1.0) -> float:
        """Return how many steps, from 1, ``every`` divides and begin with ``start <= u < until``; infinite if unknown."""
        if math.isinf(every) or math.isinf(self.steps):
            return math.inf
        last = min(self.steps, math.ceil(until * self.steps - _ROUNDING))
        return max(0, (last - self.first(every, start)) // every + 1)


class ActsLate(Technique):
    """A technique that first acts after some steps, and warns if the run is too short.

    It warns when training starts if only ``max_steps`` and ``max_epochs`` end the run; otherwise when training ends.
    """

    _asks = False  # whether the answer is known only at the end of the run

    @property
    @abstractmethod
    def acted(self) -> bool:
        """Whether the technique has acted, in the runs before a checkpoint too."""

    @abstractmethod
    def will_act(self, length: Length) -> bool:
        """Return whether it will act in a run of this length; True if unknown."""

    @abstractmethod
    def idle(self, length: Length) -> str:
        """Return why it does not act in such a run, the consequence, and a sentence with the argument to set."""

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
        elif math.isfinite(length.steps) and math.isfinite(length.epoch):  # a run stopped early may be resumed
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
        automatic = trainer.lightning_module.automatic_optimization  # else a batch may have any number of steps
        known = automatic and math.isfinite(batches) and batches > 0
        epoch = math.ceil(batches / trainer.accumulate_grad_batches) if known else math.inf
        limits = self.session.progress.limits()
        if not limits or limits.keys() - {"max_steps", "max_epochs"}:
            return Length(math.inf, epoch)
        by_epochs = limits["max_epochs"] * epoch if "max_epochs" in limits and known else math.inf
        steps = min(limits.get("max_steps", math.inf), by_epochs)
        return Length(int(steps) if math.isfinite(steps) else steps, epoch)


def _steps(length: Length) -> str:
    return f"{length.steps:,} step{'s' if length.steps != 1 else ''}"
