"""Sets the learning rate and weight decay of a module's optimizers from outside, if its config has no argument for them."""

import math
from typing import Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._optim.scheduled import optimizers_of, schedulers_of
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def scale_rates(optimizers: list[Optimizer], schedulers: list[Any], rate: float) -> None:
    """Set the largest learning rate of all groups to ``rate``, and scale the others with it. Schedules keep their shapes."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    made = [float(group[name]) for group in groups for name in _RATES[:3] if group.get(name) is not None]
    largest = max(made, default=0.0)
    if largest <= 0.0:
        raise ValueError(
            f"OptimizerSettings({rate=}): the module's optimizers have no learning rate above 0. Set one in the module."
        )
    factor = rate / largest
    for group in groups:
        for name in _RATES:
            if group.get(name) is not None:
                group[name] = group[name] * factor
    waiting, seen = list(schedulers), set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if isinstance(getattr(one, name, None), list):
                setattr(one, name, [value * factor for value in getattr(one, name)])
        waiting += getattr(one, "_schedulers", [])


def set_decays(optimizers: list[Optimizer], weight_decay: float) -> None:
    """Set the largest weight decay of all groups to ``weight_decay``, and scale the others. If none decays, set all."""
    groups = [group for o in optimizers for group in o.param_groups if group.get("weight_decay") is not None]
    largest = max((float(group["weight_decay"]) for group in groups), default=0.0)
    for group in groups:
        group["weight_decay"] = float(group["weight_decay"]) / largest * weight_decay if largest else weight_decay


class OptimizerSettings(Technique):
    """Train with another learning rate and weight decay than those of the module's optimizers.

    ``lightning-eff tune`` uses it in recipes for modules that take neither as an argument. Put it before all techniques.

    Args:
        rate: the learning rate of the group with the largest one, > 0. Other groups scale with it, and schedules keep their
            shapes. None keeps the module's.
        weight_decay: the largest weight decay of all groups, >= 0. None keeps the module's.

    Raises:
        ValueError: for other values, and at setup for optimizers without a learning rate.
    """

    saves: ClassVar[str] = "steps: the module's own optimizer, tuned"
    paper: ClassVar[str] = "-"
    control: ClassVar[Control] = Control("the baseline with the same settings")
    needs_automatic_optimization: ClassVar[bool] = False
    needs_optimizer: ClassVar[bool] = True
    needs: ClassVar[Need] = Need.BATCH
    refuses: ClassVar[Reasons] = dict.fromkeys(Part, "")
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, rate: float | None = None, weight_decay: float | None = None) -> None:
        if rate is not None and not 0.0 < rate < math.inf:
            raise ValueError(f"OptimizerSettings({rate=}): expected a finite learning rate above 0, or None.")
        if weight_decay is not None and not 0.0 <= weight_decay < math.inf:
            raise ValueError(f"OptimizerSettings({weight_decay=}): expected a finite number >= 0, or None.")
        self.rate, self.weight_decay = rate, weight_decay

    @property
    @override
    def neutral(self) -> bool:
        return self.rate is None and self.weight_decay is None

    @override
    def attach(self, session: Session) -> None:
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            optimizers = optimizers_of(configured)
            if self.rate is not None:
                scale_rates(optimizers, schedulers_of(configured), self.rate)
            if self.weight_decay is not None:
                set_decays(optimizers, self.weight_decay)
            return configured

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    @override
    def summary(self) -> str:
        return f"rate {self.rate}, weight decay {self.weight_decay}"
