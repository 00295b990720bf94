"""The learning rate of an arm over its budget: the module's own schedule, stretched, or the bench's in its place."""

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
    """Rates that the bench leaves alone: those of a technique that sets them, or of a module that steps its own.

    Args:
        trainer: at the start of training.
        pace: how the arm is paced.
    """

    def __init__(self, trainer: Trainer, pace: Pace) -> None:
        self._optimizers = list(trainer.optimizers)
        self._groups: list[dict[str, Any]] = [group for o in trainer.optimizers for group in o.param_groups]
        self._bases = [group["lr"] for group in self._groups]
        self._pace = pace

    def follow(self, u: float) -> float:
        """Set the rates to where they stand at the share ``u`` of the budget; returns the largest."""
        self._set(u)
        return self.largest()

    def largest(self) -> float:
        """The largest of the rates as they stand."""
        return max(float(group["lr"]) for group in self._groups)

    def _set(self, u: float) -> None:
        pass

    def _scale(self, factor: float) -> None:
        """Every group's base rate times ``factor``, and times the arm's own peak by the module's if it brings one."""
        largest = max(self._bases, default=0.0)
        if self._pace.rate is not None and largest > 0:
            factor *= self._pace.rate / largest
        for group, base in zip(self._groups, self._bases, strict=True):
            group["lr"] = base * factor
        self._settle()

    def _settle(self) -> None:
        """What was set here, nobody has written by hand."""
        for optimizer in self._optimizers:
            settle(optimizer)


class Replaced(Rates):
    """The bench's schedule in the place of the module's."""

    def _set(self, u: float) -> None:
        self._scale(decay(self._pace.schedule, u, WARM_UP if self._pace.warm_up is None else self._pace.warm_up))


class Stretched(Rates):
    """The module's own schedule, laid out over the budget: at ``u`` each scheduler stands where ``u`` of its steps lead.

    With a rate or a warm-up of the arm's own, the schedule is scaled to another peak, and the peak is moved to another share
    of the budget. The schedule is stepped through once, and put back, to find its peak. Its two parts keep their shapes: what
    rises up to the peak is stretched over the warm-up, and what falls after it over the rest. A schedule that begins at its
    peak is given a linear warm-up.
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
        if self._own:  # the schedule's own rates again, from which it steps on
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
    """How the learning rates of an arm are led.

    Raises:
        Incomparable: where a scheduler follows the metric, or where a rate or a warm-up of the arm's own has nothing to act
            on: under manual optimization, and for a warm-up where a technique of the recipe sets the rate.
    """
    sets_rates = any(technique.sets_rates for technique in techniques_of(trainer))
    for config in trainer.lr_scheduler_configs if pace.schedule == "own" and not sets_rates else ():
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
            raise Incomparable(
                "Got ReduceLROnPlateau, whose rate follows the metric; expected one that decays with the run, so that it is"
                " decayed wholly over every budget. Use another scheduler, or --schedule linear."
            )
    automatic = trainer.lightning_module.automatic_optimization
    if pace.schedule == "own" and not automatic and (pace.rate is not None or pace.warm_up is not None):
        raise Incomparable(
            "Got a rate or a warm-up for a module with manual optimization, which steps its schedulers by itself; expected"
            " automatic optimization. Set the rate in the module, or use --schedule linear."
        )
    if sets_rates:
        if pace.warm_up is not None:
            raise Incomparable(
                "Got a warm-up of its own for an arm whose recipe sets the learning rate by a technique; expected the warm-up"
                " among that technique's settings. Give it there."
            )
        rates = Rates(trainer, pace)
        rates._scale(1.0)  # what the technique multiplies is the arm's own rate
        return rates
    if pace.schedule != "own":
        return Replaced(trainer, pace)
    return Stretched(trainer, pace) if automatic else Rates(trainer, pace)


def _length(trainer: Trainer, pace: Pace, config: LRSchedulerConfig) -> int:
    """How many steps of its own a scheduler makes in the budget."""
    whole = pace.steps if config.interval == "step" else int(trainer.max_epochs or 1)
    return max(whole // config.frequency, 1)


def positions(scheduler: Any, length: int) -> list[float]:
    """The largest rate at each of ``length`` positions of a scheduler, which is afterwards as it was, with its optimizer."""
    groups = scheduler.optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    kept, state = copy.deepcopy(kept), copy.deepcopy(scheduler.state_dict())
    rates = [max(float(group["lr"]) for group in groups)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer has stepped before
        for _ in range(length - 1):
            scheduler.step()
            rates.append(max(float(group["lr"]) for group in groups))
    scheduler.load_state_dict(state)
    for group, values in zip(groups, kept, strict=True):
        group.update(values)
    return rates
