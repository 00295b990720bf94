"""A rate and a warm-up of an arm's own, put upon the schedule that its module brings."""

import copy
import warnings
from typing import Any

from lightning.pytorch import Trainer

from lightning_eff.bench.pace import Incomparable, Pace


class OwnRate:
    """Scales a module's schedule to another peak, and moves the peak to another share of the budget.

    The schedule is stepped through once, and put back, to find its peak. Its two parts keep their shapes: what rises up to
    the peak is stretched over the warm-up, and what falls after it over the rest. A schedule that begins at its peak is given
    a linear warm-up.

    Args:
        trainer: at the start of training.
        pace: with ``rate`` or ``warm_up``.
        lengths: how many steps of its own each scheduler makes.

    Raises:
        Incomparable: under manual optimization, where the module steps its schedulers by itself.
    """

    def __init__(self, trainer: Trainer, pace: Pace, lengths: list[int]) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise Incomparable(
                "Got a rate or a warm-up for a module with manual optimization, which steps its schedulers by itself;"
                " expected automatic optimization. Set the rate in the module, or use --schedule linear."
            )
        self._groups: list[dict[str, Any]] = [group for o in trainer.optimizers for group in o.param_groups]
        self._plain = [float(group["lr"]) for group in self._groups]
        peak, self._at = max(self._plain, default=0.0), 0.0
        for config, length in zip(trainer.lr_scheduler_configs, lengths, strict=True):
            for position, rate in enumerate(_rates(config.scheduler, length)):
                if rate > peak * (1 + 1e-9):
                    peak, self._at = rate, position / length
        self._scale = pace.rate / peak if pace.rate is not None and peak > 0 else 1.0
        self._warm_up = pace.warm_up

    def position(self, u: float) -> float:
        """Where the schedule stands at the share ``u`` of the budget, as a share of the schedule."""
        w = self._warm_up
        if w is None:
            return u
        return u / w * self._at if u < w else self._at + (u - w) / (1 - w) * (1 - self._at)

    def put_back(self) -> None:
        """The schedule's own rates again, from which it steps on."""
        for group, rate in zip(self._groups, self._plain, strict=True):
            group["lr"] = rate

    def scale(self, u: float) -> None:
        """The arm's rates in the place of the schedule's own."""
        self._plain = [float(group["lr"]) for group in self._groups]
        w = self._warm_up
        ramp = max(u, 1e-3) / w if w and self._at == 0.0 and u < w else 1.0
        for group, rate in zip(self._groups, self._plain, strict=True):
            group["lr"] = rate * self._scale * min(ramp, 1.0)


def _rates(scheduler: Any, length: int) -> list[float]:
    """The largest rate of each of its positions; the scheduler and its optimizer are afterwards as they were."""
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
