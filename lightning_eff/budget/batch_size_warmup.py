"""A batch that grows over the run, with the rate that fits it (Smith et al. 2017, arXiv:1711.00489)."""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core.batches import join, like, plain
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "BatchSizeWarmup"


def batch_sizes(start: int, full: int, steps: int | None, growth: str) -> list[int]:
    """The batches of a run, each larger than the one before, in batches of the run's own.

    ``m_i = start + (full - start) i / n`` (linear) or ``start (full / start)^(i / n)`` (geometric), ``i = 0 .. n``, rounded.

    Args:
        start: >= 1.
        full: >= start.
        steps: the number ``n`` of times that it grows; None for one by one, or by doubling.
        growth: "linear" or "geometric".
    """
    if steps is None:
        steps = full - start if growth == "linear" else math.ceil(math.log2(full / start))
    steps = max(steps, 1)
    if growth == "linear":
        sizes = [start + (full - start) * i / steps for i in range(steps + 1)]
    else:
        sizes = [start * (full / start) ** (i / steps) for i in range(steps + 1)]
    return sorted({round(size) for size in sizes})


def batch_at(u: float, sizes: list[int], until: float) -> int:
    """The batch at the share ``u`` of the budget: each of ``sizes`` but the last for an equal part of ``[0, until)``."""
    if u >= until:
        return sizes[-1]
    return sizes[int(u / until * (len(sizes) - 1) + 1e-9)]


class MeanWindow(int):
    """The mean accumulation window of a run, as whoever counts its optimizer steps divides by it.

    ``Trainer.estimated_stepping_batches``, and modules that do as it does, divide the batches of an epoch by
    ``accumulate_grad_batches``; a window that grows has no other number to give them.
    """

    def __new__(cls, window: float) -> "MeanWindow":
        made = super().__new__(cls, max(round(window), 1))
        made.window = window
        return made

    window: float

    def __rtruediv__(self, batches: float) -> float:
        return batches / self.window

    def __rfloordiv__(self, batches: float) -> int:
        return int(batches // self.window)


def _decayed_rate(technique: Any) -> Mapping[str, Technique]:
    if technique.by == "rate" or technique.neutral:
        return {}
    return {"decayed_rate": BatchSizeWarmup(**{**technique.settings, "by": "rate"})}


class BatchSizeWarmup(Technique):
    """Grow the batch of an optimizer step over the first ``until`` of the budget, and scale the rate with it.

    The unit is the run's own batch: what the loader makes, times ``accumulate_grad_batches``, on every rank. The batch is
    ``start`` of them at first and ``full`` from ``until`` on, in ``steps`` rises spread evenly over that time. To begin below
    the batch that was tuned, give the loader a smaller one: a loader's 8 with ``start=1, full=3, steps=2, until=2/3`` is
    8, 16, 24 by thirds of the run.

    With ``m`` such batches in a step, the step is made at the rate of the module's schedule times ``m ** power``, scaled within
    the optimizer's step alone: LearningRateMonitor shows it unscaled, and any schedule goes on as it is. The noise of SGD goes
    with rate / batch (Smith et al.), that is with ``m ** (power - 1)``. ``power=0`` is their recipe: the batch grows where the
    rate would fall, so leave out that part of the decay. ``by="rate"`` is what it is equivalent to and held against: the batch
    stays, and the rate is divided instead, along the same path of rate / batch.

    Settings to begin with: for AdamW and its like ``full=2..4``, ``until=0.3..0.6`` with ``power=0.5`` beside a schedule over
    the whole run; for SGD with momentum ``growth="geometric"``, ``power=1`` while the rate would be too high for the small
    batch, or 0 in place of decay.

    The gradient is the mean over all micro-batches, as with ``accumulate_grad_batches``, so clipping acts on it as before and
    each rank waits for the others once in a step. The batch grows where an epoch's batches divide into windows of both
    sizes, which may be a few steps late; the last window of an epoch may be a shorter one, of which Lightning
    sums as many parts as there are, each weighted as in a whole one, and ``by="batch"`` takes the mean. Modules that ask
    ``trainer.estimated_stepping_batches`` are told the steps that there will be.

    Logged: ``batches``, the loader's batches in a step; ``rate_factor``.

    Args:
        start: batches of the run's own in a step at first, >= 1.
        until: the share of the budget in (0, 1] at which ``full`` is reached.
        steps: how often it grows, >= 1; None for one batch at a time, or by doubling where growth is geometric.
        full: batches of the run's own in a step at last, >= start. 1 is plain training.
        growth: "linear" or "geometric".
        power: of the batch, that the rate is multiplied with, in [0, 2]; 1/2 suits Adam, 1 SGD, 0 replaces decay.
        by: "accumulation" sums the gradients of micro-batches, at the memory of one; "batch" puts them together into one
            larger batch, which a GPU computes faster and BatchNorm sees as one; "rate" leaves the batch (see above).

    Raises:
        ValueError: for other values; at setup, beside ``GradientAccumulationScheduler`` or ``StochasticWeightAveraging`` of
            Lightning's, which change the windows too, and with ``by="batch"`` beside techniques that say which samples
            a batch has; as training starts, where an epoch has too few batches for any growth; with ``by="batch"``, where
            batches are of shapes that cannot be put together.

    Sources:
        Smith et al. 2017, arXiv:1711.00489; Goyal et al. 2017, arXiv:1706.02677 (linear); Malladi et al. 2022,
        arXiv:2205.10287 (the square root, for Adam).
    """

    saves: ClassVar[str] = "samples early in training, where small batches learn as much by each step"
    paper: ClassVar[str] = "Smith et al. 2017, arXiv:1711.00489"
    constraints: ClassVar[str] = "epochs of more batches than a step has at first"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("large batches", shen="5.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"full": Choice((2, 3, 4)), "until": Uniform(0.2, 0.8), "power": Choice((0.0, 0.5, 1.0))}
    )
    control: ClassVar[Control] = Control(
        "the rate divided where the batch would grow, on the batch as it is: the same path of rate / batch",
        _decayed_rate,
    )
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True

    def __init__(
        self,
        start: int = 1,
        until: float = 0.5,
        *,
        steps: int | None = None,
        full: int = 4,
        growth: Literal["linear", "geometric"] = "linear",
        power: float = 0.5,
        by: Literal["accumulation", "batch", "rate"] = "accumulation",
    ) -> None:
        for name, value, least in (("start", start, 1), ("full", full, 1), ("steps", steps, 1)):
            if name == "steps" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= {least}.")
        if full < start or (full == start and full > 1):
            raise ValueError(
                f"{WHO}({start=}, {full=}): expected full > start, because the batch grows from one to the other. For a"
                " larger batch throughout, set the Trainer's accumulate_grad_batches."
            )
        if not 0.0 < until <= 1.0:
            raise ValueError(f"{WHO}({until=}): expected a share of the budget in (0, 1], at which the batch is full.")
        if growth not in ("linear", "geometric"):
            raise ValueError(f"{WHO}({growth=}): expected 'linear' or 'geometric'.")
        if not 0.0 <= power <= 2.0:
            raise ValueError(
                f"{WHO}({power=}): expected a number in [0, 2]: 0 leaves the rate, 0.5 suits Adam, 1 suits SGD."
            )
        if by not in ("accumulation", "batch", "rate"):
            raise ValueError(f"{WHO}({by=}): expected 'accumulation', 'batch' or 'rate'.")
        self.sizes = batch_sizes(start, full, steps, growth)
        if steps is not None and full > 1 and len(self.sizes) != steps + 1:
            raise ValueError(
                f"{WHO}({start=}, {full=}, {steps=}): from {start} to {full} batches there are"
                f" {len(self.sizes) - 1} rises by whole ones with growth={growth!r}; expected steps of at most that."
            )
        self.start, self.until, self.full, self.power = start, until, full, power
        self.by: Literal["accumulation", "batch", "rate"] = by
        self.settings = {"start": start, "until": until, "steps": steps, "full": full, "growth": growth, "power": power}
        self._scaled: ScaledSteps | None = None
        self._reset()

    def _reset(self) -> None:
        self._own = 0  # the trainer's accumulate_grad_batches
        self._m = self.start
        self._joining: dict[int, Any] = {}  # by="batch": the loader's batches that wait, by their number in the epoch
        self._saved: dict[int, Any] = {}  # those of a checkpoint, in plain containers

    @property
    @override
    def neutral(self) -> bool:
        return self.full == 1

    @property
    @override
    def changes_shapes(self) -> bool:
        return self.by == "batch"

    # -- the run

    @override
    def check(self, session: Session) -> None:
        for callback in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_a(callback, GradientAccumulationScheduler, StochasticWeightAveraging):
                raise ValueError(
                    f"{WHO} and {type(callback).__name__} cannot train together: both change the trainer's"
                    " accumulate_grad_batches. Take one of them out of the trainer's callbacks."
                )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        trainer = session.trainer
        self._own = trainer.accumulate_grad_batches
        if self.by == "rate":
            return
        session.patches.set(trainer, "accumulate_grad_batches", self._own * self._m)
        configure = session.module.configure_optimizers

        @functools.wraps(configure)
        def configure_optimizers() -> Any:
            now = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = MeanWindow(self._own * self.mean_batch())
            try:
                return configure()
            finally:
                trainer.accumulate_grad_batches = now

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)
        if self.by == "batch":
            session.chain.add(Stage.JOIN, self._link)

    def mean_batch(self) -> float:
        """The samples of a run over its optimizer steps, both as if its budget were samples: ``1 / mean_u(1 / m)``."""
        rises = len(self.sizes) - 1
        inverse = sum(self.until / rises / m for m in self.sizes[:-1]) + (1 - self.until) / self.sizes[-1]
        return 1 / inverse

    @override
    def on_model(self, session: Session) -> None:
        other = session.loaders.taken_by or session.loaders.told_to
        if self.by == "batch" and other:
            raise ValueError(
                f"{WHO}(by='batch') and {other} cannot train together: the latter says, or must know, which samples"
                " each of the loader's batches has. Use by='accumulation'."
            )

    @override
    def on_optimizers(self, session: Session) -> None:
        self._scaled = ScaledSteps(session.optimizers, lambda: self.rate_factor)

    @property
    def rate_factor(self) -> float:
        """What the rate of the step at hand is multiplied with."""
        # rate / batch is the same in both
        return float(self._m ** (self.power - 1.0 if self.by == "rate" else self.power))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral and not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue] -- one batch to try
            self._check_epoch(trainer.num_training_batches)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        trainer = session.trainer
        if batch_idx % trainer.accumulate_grad_batches:
            return
        wanted = batch_at(session.progress.u, self.sizes, self.until)
        if self.by == "rate":
            self._m = wanted
        elif wanted != self._m and batch_idx % (self._own * wanted) == 0:  # both windows begin here
            self._m = wanted
            trainer.accumulate_grad_batches = self._own * wanted

    def _check_epoch(self, batches: float) -> None:
        if self.by == "rate" or not math.isfinite(batches):
            return
        if batches <= self._own * self.start:
            raise ValueError(
                f"{WHO}(start={self.start}): an epoch has {batches:,.0f} batches and a step takes {self._own * self.start} of"
                " them from the start, so the batch cannot grow. Give the loader smaller batches, or lower start or the"
                " Trainer's accumulate_grad_batches."
            )
        if batches < self._own * self.full:
            rank_zero_info(
                f"{WHO}(full={self.full}): an epoch has {batches:,.0f} batches, fewer than the {self._own * self.full} of a"
                " full step; steps of the whole epoch are the largest."
            )

    # -- by="batch"

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Keep the batch until ``m`` are there, then run the step on all of them as one."""
        m, at = self._m, step.batch_idx
        self._joining.update({i: like(batch, held) for i, held in self._saved.items()})
        self._saved = {}
        self._joining = {i: held for i, held in self._joining.items() if at - at % m <= i < at}
        last = self.session.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if (at + 1) % m and not last:
            self._joining[at] = batch
            return torch.zeros((), device=step.module.device, requires_grad=True)  # nothing to learn yet
        parts = [*self._joining.values(), batch]
        self._joining = {}
        if len(parts) > 1:
            try:
                batch = join(parts)
            except ValueError as error:
                raise ValueError(
                    f"{WHO}(by='batch'): {error} Use by='accumulation', which leaves batches apart."
                ) from error
        output = proceed(batch)
        # Lightning divides by the window; the mean of m batches has come at once
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * m}
        return None if output is None else output * m

    # -- what is kept

    @override
    def state_dict(self) -> dict[str, Any]:
        joining: list[Any] = []
        if (self._joining or self._saved) and self._session is not None:
            joining = self._session.gather({**self._saved, **{at: plain(batch) for at, batch in self._joining.items()}})
        return {"m": self._m, "joining": joining}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        session = self._session
        if session is None or not session.fitting or self.neutral:
            return
        self._m = state_dict["m"]
        ranks = state_dict["joining"]
        if session.rank < len(ranks):
            self._saved = dict(ranks[session.rank])
        if self.by != "rate":
            session.trainer.accumulate_grad_batches = self._own * self._m

    @override
    def detach(self, session: Session) -> None:
        self._joining = {}
        if self._scaled is not None:
            self._scaled.remove()
            self._scaled = None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"batches": self._own * (1 if self.by == "rate" else self._m), "rate_factor": self.rate_factor}

    @override
    def summary(self) -> str:
        if self.by == "rate":
            return f"the rate was divided by up to {1 / self.rate_factor:.3g}, the batch as it was"
        return (
            f"the last step took {self._own * self._m} of the loader's batches, at {self.rate_factor:.3g} of the rate"
        )
