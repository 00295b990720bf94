"""Stochastic weight averaging (SWA): the mean of weights along a high learning rate (Izmailov et al. 2018)."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Number
from lightning_eff._core._optim.chunks import chunks, local
from lightning_eff._core._optim.pinned_rates import HeldRates
from lightning_eff._core._optim.scheduled import reference_rates
from lightning_eff._core._optim.tensors import piece
from lightning_eff._core._run.delayed_start import ActsLate, Length
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import AveragedWeights, BNBatches, rivals
from lightning_eff.optim.averaging._snapshots import Interval, Start


def cycle_rate(i: int, length: int, *, high: float, low: float) -> float:
    """``alpha(i) = (1 - t) high + t low`` with ``t = (i mod c + 1) / c``: the learning rate within a cycle.

    Args:
        i: the step, from 0.
        length: ``c``, the number of steps of a cycle, >= 1.
        high: the learning rate from which a cycle falls.
        low: the learning rate of its last step.
    """
    # t(i) = (mod(i − 1, c) + 1) / c for i from 1
    t = (i % length + 1) / length
    # α(i) = (1 − t) α1 + t α2
    return (1 - t) * high + t * low


class StochasticWeightAveraging(ActsLate, AveragedWeights):
    """Keep the learning rate high late in the run, and validate and save the mean of the weights at cycle ends.

    Before ``start`` the module trains as usual. From then on, every group's learning rate is ``rate`` times its highest one,
    whatever the module's own schedule says. With ``low`` it falls from there to ``low`` within every cycle. At the end of
    each cycle the weights are added to the mean, with equal weight for every cycle.

    Use it for flatter minima, or for good weights while the learning rate is still high. It does not save time by itself.
    It costs one more copy of the weights, in float32 at least.

    The module holds the mean while the trainer validates, and from the end of fit on. Every checkpoint's ``state_dict`` is
    the mean once there is one; the raw weights are in this callback's state, from which a resumed fit continues. BatchNorm
    statistics are recomputed for each mean that is used, by the rule of torch's ``update_bn``. The forward passes for this
    leave no trace in the run, and their cost is counted.

    Lightning's callback of the same name replaces the trainer's schedulers for the rest of the fit, and recomputes
    statistics only once, in an extra epoch at the end. In a YAML file the short name is ambiguous: write ``class_path:
    lightning_eff.StochasticWeightAveraging``.

    Args:
        start: the fraction of the budget at which it begins to act. 1 is plain training.
        rate: the learning rate from ``start`` on, and at the start of each cycle, as a fraction of each group's highest.
        low: the learning rate at the end of each cycle, as a fraction of the highest, at most ``rate``; None for ``rate``.
        cycle: the length of a cycle: "epoch", or a number of optimizer steps.
        bn_batches: the number of training batches, on each rank, from which BatchNorm statistics are recomputed; None uses
            a whole epoch.

    Raises:
        ValueError: for a value out of range. At setup, in a run without an end, under manual optimization, or with another
            weight average or learning-rate schedule of this package. When training starts, for ``low`` with
            ``cycle="epoch"`` and a loader without a length.

    Example:
        >>> swa = lightning_eff.StochasticWeightAveraging(start=0.75, rate=0.5)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[swa])

    References:
        Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407.
    """

    saves: ClassVar[str] = "no time by itself: flatter minima, and good weights while the learning rate is still high"
    paper: ClassVar[str] = "Izmailov et al. 2018, arXiv:1803.05407"
    constraints: ClassVar[str] = "needs automatic optimization; keeps one more copy of the weights in float64"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"start": Choice((0.5, 0.75, 0.9)), "rate": Uniform(0.05, 1.0, log=True)}
    )
    control: ClassVar[Control] = Control("the baseline for the same time with a learning rate that decays to zero")
    conflicts: ClassVar = {
        **rivals("ExponentialMovingAverage", "LatestWeightAveraging", "Lookahead"),
        "LearningRateSchedule": "both set the learning rate",
    }
    needs_budget: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"start": 1.0}

    def __init__(
        self,
        start: Start = 0.75,
        *,
        rate: Annotated[float, Number(above=0)] = 0.5,
        low: Annotated[float, Number(above=0)] | None = None,
        cycle: Interval = "epoch",
        bn_batches: BNBatches = 100,
    ) -> None:
        if low is not None and low > rate:
            raise ValueError(
                f"StochasticWeightAveraging({low=}, {rate=}): low must be at most rate. Lower it, or omit it."
            )
        self.start = start
        self.rate = rate
        self.low = low
        self.cycle: Literal["epoch"] | int = cycle
        self.bn_batches = bn_batches

    @override
    def _reset(self) -> None:
        super()._reset()
        self._counts: dict[str, int] = {}  # the number of weights in each mean
        self._bases: list[list[float | None]] = []
        self._saved_bases: list[list[float | None]] = []
        self._rates = HeldRates("StochasticWeightAveraging")
        self._steps = 0  # since start
        self._active = False

    # -- the run

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        schedulers = [config.scheduler for config in session.trainer.strategy.lr_scheduler_configs]
        self._bases = [reference_rates(optimizer, schedulers) for optimizer in session.optimizers]
        for bases, saved in zip(self._bases, self._saved_bases, strict=False):
            bases += saved[len(bases) :]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral and self.low is not None and math.isinf(self._length(trainer)):
            raise ValueError(
                f"StochasticWeightAveraging(low={self.low}, cycle='epoch'): the training loader has no length, so the end of a"
                " cycle is unknown. Give the cycle in optimizer steps, such as cycle=500."
            )

    def _length(self, trainer: Trainer) -> float:
        """The number of optimizer steps in a cycle."""
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
        moved: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for name, p in self.tensors(session).parameters.items():
            if name in self._held:
                self._counts[name] += 1
                means, weights = moved.setdefault(self._counts[name], ([], []))
                # a checkpoint of an earlier version has it in float64
                mean = self._held[name] = self._held[name].to(torch.promote_types(p.dtype, torch.float32))
                means.append(mean)
                weights.append(p)
            elif p.requires_grad:
                w = piece(p)
                self._held[name] = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
                self._counts[name] = 1
        for n, (means, weights) in moved.items():
            # w_SWA = w_SWA + (w − w_SWA) / n
            for mean, w in chunks(means, local(weights, weights)):
                torch._foreach_lerp_(mean, [y.to(x.dtype) for x, y in zip(mean, w, strict=True)], 1 / n)  # pyright: ignore[reportPrivateImportUsage]
        self.outdate(session)

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        yield from self._held.items()

    @override
    def forget(self) -> None:
        super().forget()
        self._counts = {}

    @override
    def saved(self) -> dict[str, Any]:
        bases = [list(rates) for rates in self._bases]  # also of groups that were added later
        state = {"counts": dict(self._counts), "steps": self._steps, "active": self._active, "bases": bases}
        return {**super().saved(), **state, "means": True}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._counts, self._steps, self._active = dict(state["counts"]), state["steps"], state["active"]
        self._saved_bases = state.get("bases", [])
        if "means" not in state:  # checkpoints of earlier versions hold sums
            self._held = {name: total / self._counts[name] for name, total in self._held.items()}

    # -- what it reports

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
            f"no cycle (cycle={self.cycle!r}{each}) ends within the last {left:,} steps, from start={self.start} on. Nothing"
            " will"
            f" be averaged, although the learning rate changes. Set a shorter cycle, such as cycle={cycle}, or an earlier"
            " start=."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"active": int(self._active), "averaged": max(self._counts.values(), default=0)}

    @override
    def summary(self) -> str:
        if not self._held:
            return f"no cycle ended after {self.start:.0%} of the run; the module holds the raw weights"
        return f"mean of the weights at {max(self._counts.values())} cycle ends; learning rate {self.rate:g} of its highest"
