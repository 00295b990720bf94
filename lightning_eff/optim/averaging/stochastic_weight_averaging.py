"""Stochastic weight averaging (SWA): the mean of weights that a rate kept high visits (Izmailov et al. 2018)."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._optim.held import HeldRates
from lightning_eff._core._optim.scheduled import reference_rates
from lightning_eff._core._run.late import ActsLate, Length
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import AveragedWeights, check_bn_batches, is_count, pieces, rivals, wide


def cycle_rate(i: int, length: int, *, high: float, low: float) -> float:
    """``alpha(i) = (1 - t) high + t low`` with ``t = (i mod c + 1) / c``: the rate of a cycle's steps, the last at ``low``.

    Args:
        i: the step, from 0.
        length: ``c``, steps of a cycle, >= 1.
        high: the rate that a cycle falls from.
        low: the rate at its end.
    """
    # t(i) = (mod(i − 1, c) + 1) / c for i from 1
    t = (i % length + 1) / length
    # α(i) = (1 − t) α1 + t α2
    return (1 - t) * high + t * low


class StochasticWeightAveraging(ActsLate, AveragedWeights):
    """From a share of the run on, keep the rate up, and validate and keep the mean of the weights at the ends of cycles.

    Up to ``start`` the module trains as it would. From there on every group's rate is ``rate`` times its highest one,
    whatever the module's own schedule says; with ``low`` it falls from that to ``low`` in every cycle. At each end of a
    cycle the weights go into the mean, which every cycle's weights have an equal part in.

    While the trainer validates, and from the end of fit on, the module holds the mean, and so does every checkpoint's
    ``state_dict``, once there is one; the raw weights are in this callback's state, and a resumed fit goes on from them.
    BatchNorm statistics are recomputed for each mean that is used, by the rule of torch's ``update_bn``, from forward passes
    of ``training_step`` that leave no trace in the run; their cost is counted.

    Lightning's callback of the same name changes the trainer's schedulers for the rest of the fit and recomputes statistics
    once, in an epoch of its own after the last. In a YAML the short name would mean either: write
    ``class_path: lightning_eff.StochasticWeightAveraging``.

    Args:
        start: the share of the budget from which on it acts, in [0, 1]; 1 is plain training.
        rate: the rate from there on, and at the start of a cycle, as a fraction of each group's highest, > 0.
        low: the rate at a cycle's end, as a fraction of the highest, in (0, rate]; None for ``rate``.
        cycle: "epoch", or optimizer steps of a cycle >= 1.
        bn_batches: how many training batches, on each rank, BatchNorm statistics are recomputed from; None takes a whole
            epoch.

    Raises:
        ValueError: for other values; at setup, in a run without an end, under manual optimization, or beside another weight
            averaging or another schedule of this package; as training starts, for ``low`` with epochs of no known length.

    Sources:
        Izmailov et al. 2018, arXiv:1803.05407.
    """

    saves: ClassVar[str] = "nothing in time: flatter minima; good weights while the rate is still high"
    paper: ClassVar[str] = "Izmailov et al. 2018, arXiv:1803.05407"
    constraints: ClassVar[str] = "automatic optimization; one more copy of the weights in float64"
    survey: ClassVar[Survey | None] = Survey("stochastic weight averaging (SWA)", zhuang="2.1", shen="5.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"start": Choice((0.5, 0.75, 0.9)), "rate": Uniform(0.05, 1.0, log=True)}
    )
    control: ClassVar[Control] = Control("the baseline for as many seconds with its learning rate decayed to zero")
    conflicts: ClassVar = {
        **rivals("ExponentialMovingAverage", "LatestWeightAveraging", "Lookahead"),
        "LearningRateSchedule": "both set the rate",
    }
    needs_automatic_optimization: ClassVar[bool] = True
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        start: float = 0.75,
        *,
        rate: float = 0.5,
        low: float | None = None,
        cycle: Literal["epoch"] | int = "epoch",
        bn_batches: int | None = 100,
    ) -> None:
        if not 0.0 <= start <= 1.0:
            raise ValueError(f"StochasticWeightAveraging({start=}): expected a fraction of the budget in [0, 1].")
        if not 0.0 < rate < math.inf:
            raise ValueError(
                f"StochasticWeightAveraging({rate=}): expected a finite number > 0, the rate as a fraction of the highest."
            )
        if low is not None and not 0.0 < low <= rate:
            raise ValueError(
                f"StochasticWeightAveraging({low=}): expected a number in (0, {rate}], the rate at a cycle's end, or None."
            )
        if cycle != "epoch" and not is_count(cycle):
            raise ValueError(
                f"StochasticWeightAveraging({cycle=}): expected 'epoch' or a number of optimizer steps >= 1."
            )
        check_bn_batches("StochasticWeightAveraging", bn_batches)
        self.start = start
        self.rate = rate
        self.low = low
        self.cycle: Literal["epoch"] | int = cycle
        self.bn_batches = bn_batches
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._counts: dict[str, int] = {}  # how many weights each of the sums holds
        self._bases: list[list[float | None]] = []
        self._rates = HeldRates("StochasticWeightAveraging")
        self._steps = 0  # since start
        self._active = False

    # -- the run

    @property
    @override
    def neutral(self) -> bool:
        return self.start == 1.0

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        schedulers = [config.scheduler for config in session.trainer.strategy.lr_scheduler_configs]
        self._bases = [reference_rates(optimizer, schedulers) for optimizer in session.optimizers]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral and self.low is not None and math.isinf(self._length(trainer)):
            raise ValueError(
                f"StochasticWeightAveraging(low={self.low}, cycle='epoch'): the training loader has no length, so where a"
                " cycle ends is not known; expected one that has. Give the cycle in optimizer steps, cycle=500."
            )

    def _length(self, trainer: Trainer) -> float:
        """Optimizer steps of a cycle."""
        if self.cycle != "epoch":
            return self.cycle
        batches = trainer.num_training_batches
        return math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else math.inf

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._active = session.progress.u >= self.start
        if not self._active:
            return
        factor = self._factor(session.trainer, batch_idx)
        schedulers = [config.scheduler for config in session.trainer.strategy.lr_scheduler_configs]
        for optimizer, bases in zip(session.optimizers, self._bases, strict=True):
            self._rates.set(optimizer, bases, factor, schedulers)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._rates.release()

    def _factor(self, trainer: Trainer, batch_idx: int) -> float:
        if self.low is None:
            return self.rate
        at = batch_idx // trainer.accumulate_grad_batches if self.cycle == "epoch" else self._steps
        return cycle_rate(at, int(self._length(trainer)), high=self.rate, low=self.low)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if not self._active or not self.stepped(session):
            return
        self._steps += 1
        if session.trainer.is_last_batch if self.cycle == "epoch" else self._steps % self.cycle == 0:
            self._take(session)

    @torch.no_grad()
    def _take(self, session: Session) -> None:
        now = pieces(session)
        for name, p in session.module.named_parameters():
            if name in self._held:
                self._held[name] += now[name]
                self._counts[name] += 1
            elif p.requires_grad:
                self._held[name] = now[name].to(wide(p), copy=True)
                self._counts[name] = 1
        self.outdate(session)

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        for name, total in self._held.items():
            # w_SWA = (1/n) Σ_j w_j
            yield name, total / self._counts[name]

    @override
    def forget(self) -> None:
        super().forget()
        self._counts = {}

    @override
    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "counts": dict(self._counts), "steps": self._steps, "active": self._active}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._counts, self._steps, self._active = dict(state["counts"]), state["steps"], state["active"]

    # -- what it tells

    @property
    @override
    def acted(self) -> bool:
        return self._taken > 0

    @override
    def will_act(self, length: Length) -> bool:
        if self.cycle == "epoch":
            return length.times(length.epoch, start=self.start) > 0
        return math.isinf(length.steps) or length.steps - math.ceil(self.start * length.steps - 1e-9) >= self.cycle

    @override
    def idle(self, length: Length) -> str:
        left = int(length.steps - math.ceil(self.start * length.steps - 1e-9))
        cycle = max(1, left // 5)
        each = f" of {length.epoch:,} steps" if self.cycle == "epoch" and math.isfinite(length.epoch) else ""
        return (
            f"no cycle (cycle={self.cycle!r}{each}) ends in its last {left:,}, from start={self.start} on: nothing will be"
            " averaged while the rate is changed all the same. Give a shorter cycle in optimizer steps, such as"
            f" cycle={cycle}, or an earlier start=."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"active": int(self._active), "averaged": max(self._counts.values(), default=0)}

    @override
    def summary(self) -> str:
        if not self._held:
            return f"no cycle ended after {self.start:.0%} of the run: the weights are the raw ones"
        return f"mean of {max(self._counts.values())} ends of cycles, the rate at {self.rate:g} of its highest"
