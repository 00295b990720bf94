"""The learning rates of the whole planned run, from copies of its schedulers."""

import copy
import inspect
import math
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_eff._core._lightning.names import is_overridden

MOST = 100_000  # steps of a schedule that are followed
FALLS = 0.95  # of its peak: a rate that ends above was not decayed
_WRITES = re.compile(r"""\[\s*["']lr["']\s*\]\s*[-+*/]?=[^=]|set_lr|update_lr|adjust_learning_rate|lr_scale""")
#: Averages and optimizers that stand for a decay.
_STAND_IN = re.compile("ScheduleFree|WeightAverag|MovingAverage|Averaging|EMA|Lookahead|SWA|Prodigy|DAdapt|DoG")


@dataclass(frozen=True)
class Rates:
    """How a parameter group's learning rate goes over the planned run.

    Attributes:
        group: in words.
        optimizer: the optimizer's class.
        first: at the start.
        peak: the largest.
        last: the smallest after the peak.
        schedule: the scheduler's class, or "" without one.
    """

    group: str
    optimizer: type
    first: float
    peak: float
    last: float
    schedule: str


class _Bare(Optimizer):
    """Has the groups of an optimizer, and parameters that nobody trains."""

    @override
    def step(self, closure: Any = None) -> Any: ...


def _bare(optimizer: Optimizer) -> _Bare:
    groups = [
        {
            **{k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"},
            "params": [torch.nn.Parameter(torch.zeros(1))],
        }
        for group in optimizer.param_groups
    ]
    made = _Bare(groups, dict(optimizer.defaults))
    for group, original in zip(made.param_groups, groups, strict=True):
        group.update({k: v for k, v in original.items() if k != "params"})
    return made


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def planned(trainer: Trainer, optimizer_steps: int | None) -> int | None:
    """Optimizer steps of the whole run; None if it has no end."""
    if optimizer_steps is not None:
        return optimizer_steps
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def follow(trainer: Trainer, module: LightningModule, optimizer_steps: int | None) -> list[Rates]:
    """The learning rates over the planned run; none where the schedule cannot be known.

    Args:
        trainer: of the run, at its start.
        module: the user's.
        optimizer_steps: of the planned run.
    """
    found: list[Rates] = []
    steps = planned(trainer, optimizer_steps)
    for i, optimizer in enumerate(trainer.optimizers):
        if any("lr" not in group for group in optimizer.param_groups) or not optimizer.param_groups:
            continue
        configs = [c for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]
        if not all(hasattr(c.scheduler, "optimizer") for c in trainer.lr_scheduler_configs):
            continue
        trajectory = _trajectory(trainer, module, optimizer, configs, steps)
        if trajectory is None:
            continue
        schedule = type(configs[0].scheduler).__name__ if configs else ""
        several, groups = len(trainer.optimizers) > 1, len(optimizer.param_groups)
        for g, values in enumerate(zip(*trajectory, strict=True)):
            at = max(range(len(values)), key=values.__getitem__)
            name = f"group {g} of " if groups > 1 else ""
            which = f"optimizer {i} ({type(optimizer).__name__})" if several else type(optimizer).__name__
            found.append(Rates(name + which, type(optimizer), values[0], values[at], min(values[at:]), schedule))
    return found


def _trajectory(
    trainer: Trainer, module: LightningModule, optimizer: Optimizer, configs: list[Any], steps: int | None
) -> list[list[float]] | None:
    if not configs:
        return [_rates(optimizer)]
    if len(configs) > 1 or steps is None or not module.automatic_optimization:
        return None  # several that follow each other, no end, or a module that steps them when it wants
    (config,) = configs
    scheduler = config.scheduler
    if not isinstance(scheduler, LRScheduler) or is_overridden("lr_scheduler_step", module):
        return None
    calls = steps // config.frequency
    if config.interval == "epoch":
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        if not math.isfinite(per_epoch) or per_epoch <= 0:
            return None
        calls = max(0, math.ceil(steps / per_epoch) - 1) // config.frequency
    if calls > MOST:
        return None
    bare = _bare(optimizer)
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    shared: list[Any] = [module, trainer, *module.modules(), *module.parameters(), *callbacks]
    memo: dict[int, Any] = {id(one): one for one in shared} | {id(optimizer): bare}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            followed = copy.deepcopy(scheduler, memo)
    except Exception:  # a scheduler of the user's own that cannot be copied
        return None
    values = [_rates(bare)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(calls):
            try:
                followed.step()
            except Exception:  # it ends before the run does, as OneCycleLR, or follows a metric
                return values if len(values) > 1 else None
            values.append(_rates(bare))
    return values


def written_by_hand(module: LightningModule, callbacks: Iterable[Any]) -> bool:
    """Whether code of the user's, or a callback, may set learning rates or stands for their decay."""
    if is_overridden("optimizer_step", module) or is_overridden("lr_scheduler_step", module):
        return True
    for one in (module, *callbacks):
        if getattr(one, "sets_rates", False) or (one is not module and _STAND_IN.search(type(one).__name__)):
            return True
        for cls in type(one).__mro__:
            if cls.__module__.split(".")[0] in ("lightning", "pytorch_lightning", "torch", "builtins", "lightning_eff"):
                continue
            try:
                if _WRITES.search(inspect.getsource(cls)):
                    return True
            except (OSError, TypeError):
                continue
    return False


def stands_in(optimizer: type) -> bool:
    """Whether an optimizer needs no decay, such as a schedule-free one."""
    return _STAND_IN.search(optimizer.__name__) is not None
