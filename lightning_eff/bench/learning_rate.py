"""Set the learning rates of an arm over its budget, with the module's own schedule or the bench's."""

import copy
import warnings
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_eff._core._optim.external_rates import settle
from lightning_eff._core.technique import techniques_of
from lightning_eff.bench.pace import WARM_UP, Incomparable, Pace, decay


class Rates:
    """Learning rates that the bench does not change, because a technique or the module itself sets them.

    Args:
        trainer: the Trainer at the start of training.
        pace: the pace of the arm.
    """

    def __init__(self, trainer: Trainer, pace: Pace) -> None:
        self._optimizers = list(trainer.optimizers)
        self._groups: list[dict[str, Any]] = [group for o in trainer.optimizers for group in o.param_groups]
        self._bases = [group["lr"] for group in self._groups]
        self._pace = pace

    def follow(self, u: float) -> float:
        """Set the learning rates at the fraction ``u`` of the budget, and return the largest."""
        self._set(u)
        return self.largest()

    def largest(self) -> float:
        """Return the largest learning rate now."""
        return max(float(group["lr"]) for group in self._groups)

    def _set(self, u: float) -> None:
        pass

    def _scale(self, factor: float) -> None:
        """Scale each group's base learning rate by ``factor``, and by the ratio of the arm's own peak to the module's."""
        largest = max(self._bases, default=0.0)
        if self._pace.rate is not None and largest > 0:
            factor *= self._pace.rate / largest
        for group, base in zip(self._groups, self._bases, strict=True):
            group["lr"] = base * factor
        self._settle()

    def _settle(self) -> None:
        """Record that these values do not come from user code."""
        for optimizer in self._optimizers:
            settle(optimizer)


class Replaced(Rates):
    """The bench's schedule instead of the module's."""

    def _set(self, u: float) -> None:
        self._scale(decay(self._pace.schedule, u, WARM_UP if self._pace.warm_up is None else self._pace.warm_up))


class Stretched(Rates):
    """The module's own schedule, stretched over the budget: at ``u``, each scheduler has made the fraction ``u`` of its steps.

    An arm's own learning rate scales the schedule, and its own warm-up moves the peak. To find the peak, the schedule is
    stepped through once and restored. The part before the peak is stretched over the warm-up, and the part after it over the
    rest. A schedule that begins at its peak gets a linear warm-up.
    """

    def __init__(self, trainer: Trainer, pace: Pace) -> None:
        super().__init__(trainer, pace)
        self._module = trainer.lightning_module
        self._schedulers = [(c.scheduler, _length(trainer, pace, c)) for c in trainer.lr_scheduler_configs]
        self._steps = [0] * len(self._schedulers)
        self._own = pace.rate is not None or pace.warm_up is not None
        self._plain = self._bases
        self._at, self._factor = 0.0, 1.0
        if self._own:
            peak = max(map(float, self._bases), default=0.0)
            for scheduler, length in self._schedulers:
                for position, rate in enumerate(positions(scheduler, length)):
                    if rate > peak * (1 + 1e-9):
                        peak, self._at = rate, position / length
            self._factor = pace.rate / peak if pace.rate is not None and peak > 0 else 1.0

    def _set(self, u: float) -> None:
        w = self._pace.warm_up
        if self._own:  # recursive schedulers continue from their own learning rates
            self._put(self._plain)
        along = u if w is None else u / w * self._at if u < w else self._at + (u - w) / (1 - w) * (1 - self._at)
        for index, (scheduler, length) in enumerate(self._schedulers):
            at = min(int(along * length + 1e-6), length - 1)
            while self._steps[index] < at:
                self._module.lr_scheduler_step(scheduler, None)
                self._steps[index] += 1
        if self._own:
            self._plain = [float(group["lr"]) for group in self._groups]
            ramp = max(u, 1e-3) / w if w and self._at == 0.0 and u < w else 1.0
            self._put([rate * self._factor * min(ramp, 1.0) for rate in self._plain])

    def _put(self, rates: list[Any]) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            group["lr"] = rate
        self._settle()


def rates_of(trainer: Trainer, pace: Pace) -> Rates:
    """Return the object that sets the learning rates of an arm.

    Raises:
        Incomparable: if a scheduler follows the metric, or if the arm's own learning rate or warm-up cannot be applied: with
            manual optimization, and for a warm-up if a technique sets the learning rate.
    """
    sets_rates = any(technique.sets_rates for technique in techniques_of(trainer))
    for config in trainer.lr_scheduler_configs if pace.schedule == "own" and not sets_rates else ():
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
            raise Incomparable(
                "Got ReduceLROnPlateau, which follows the metric; expected a schedule over the run, which decays fully in every"
                " budget. Use another scheduler, or --schedule linear."
            )
    automatic = trainer.lightning_module.automatic_optimization
    if pace.schedule == "own" and not automatic and (pace.rate is not None or pace.warm_up is not None):
        raise Incomparable(
            "Got a learning rate or a warm-up for a module with manual optimization, which steps its schedulers itself;"
            " expected automatic optimization. Set the learning rate in the module, or use --schedule linear."
        )
    if sets_rates:
        if pace.warm_up is not None:
            raise Incomparable(
                "Got --warm-up for an arm in which a technique sets the learning rate. Set the warm-up in that technique's"
                " settings."
            )
        rates = Rates(trainer, pace)
        rates._scale(1.0)  # the technique multiplies the arm's own learning rate
        return rates
    if pace.schedule != "own":
        return Replaced(trainer, pace)
    return Stretched(trainer, pace) if automatic else Rates(trainer, pace)


def _length(trainer: Trainer, pace: Pace, config: LRSchedulerConfig) -> int:
    """Return the number of steps that a scheduler makes in the budget."""
    whole = pace.steps if config.interval == "step" else int(trainer.max_epochs or 1)
    return max(whole // config.frequency, 1)


def positions(scheduler: Any, length: int) -> list[float]:
    """Return the largest learning rate at each of ``length`` steps of a scheduler; it and its optimizer are restored."""
    groups = scheduler.optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    kept, state = copy.deepcopy(kept), copy.deepcopy(scheduler.state_dict())
    rates = [max(float(group["lr"]) for group in groups)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a scheduler that steps before its optimizer
        for _ in range(length - 1):
            scheduler.step()
            rates.append(max(float(group["lr"]) for group in groups))
    scheduler.load_state_dict(state)
    for group, values in zip(groups, kept, strict=True):
        group.update(values)
    return rates
