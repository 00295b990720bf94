"""Grow the batch size over the run and scale the learning rate with it (Smith et al. 2017, arXiv:1711.00489)."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core.batches import join, like, plain
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "BatchSizeWarmup"


def batch_sizes(start: int, full: int, steps: int | None, growth: str) -> list[int]:
    """Return the increasing batch sizes of a run, in units of the run's own batch.

    ``m_i = start + (full - start) i / n`` (linear) or ``start (full / start)^(i / n)`` (geometric), ``i = 0 .. n``, rounded.

    Args:
        start: the first size, >= 1.
        full: the last size, >= start.
        steps: the number ``n`` of increases. None grows by one batch at a time (linear) or by doubling (geometric).
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
    """Return the batch size at the fraction ``u`` of the budget. All sizes but the last split ``[0, until)`` evenly."""
    if u >= until:
        return sizes[-1]
    return sizes[int(u / until * (len(sizes) - 1) + 1e-9)]


class MeanWindow(int):
    """The mean accumulation window of a run, for code that divides by it to count optimizer steps.

    ``Trainer.estimated_stepping_batches``, and modules that compute the same, divide the batches of an epoch by
    ``accumulate_grad_batches``. A window that grows has no single value, so they get the mean.
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
    """Grow the batch of each optimizer step over the first part of training, and scale the learning rate with it.

    Sizes are in units of the run's own batch: the loader's batch times ``accumulate_grad_batches``, on every rank. A step
    takes ``start`` of these batches at first and ``full`` from ``until`` on, with ``steps`` increases spread evenly in
    between. To begin below your tuned batch size, use a smaller loader batch: a loader batch of 8 with
    ``start=1, full=3, steps=2, until=2/3`` trains on 8, 16 and 24 samples for a third of the run each.

    With ``m`` batches in a step, the learning rate of the module's schedule is multiplied by ``m ** power`` within the
    optimizer step. LearningRateMonitor shows the unscaled value, and any scheduler continues to work. The noise of SGD is
    proportional to learning rate / batch size, here ``m ** (power - 1)``. ``power=0`` is the recipe of Smith et al.: the
    batch grows where the learning rate would decay, so remove that part of the decay. ``by="rate"`` is the equivalent
    control: the batch size stays, and the learning rate is divided along the same path of learning rate / batch size.

    Use it where small batches learn as much per step early in training. For AdamW and similar optimizers, start with
    ``full`` of 2 to 4, ``until`` of 0.3 to 0.6 and ``power=0.5``, with a schedule over the whole run. For SGD with momentum,
    use ``growth="geometric"`` with ``power=1`` if the learning rate is too high for the small batch, or ``power=0`` instead
    of decay. It adds no passes and, with ``by="accumulation"``, no memory.

    The gradient is the mean over all micro-batches, as with ``accumulate_grad_batches``. Clipping therefore acts as before,
    and ranks synchronize once per step. The batch grows only where both window sizes divide the position in the epoch, which
    may be a few steps late. The last window of an epoch may be shorter: Lightning then sums its micro-batches with the
    weights of a full window, and ``by="batch"`` takes their mean. ``trainer.estimated_stepping_batches`` counts the steps
    that the run will make.

    It logs ``batches``, the number of loader batches per step, and ``rate_factor``.

    Args:
        start: the number of the run's own batches per step at first.
        until: the fraction of the budget at which ``full`` is reached.
        steps: the number of increases. None grows by one batch at a time, or by doubling if growth is geometric.
        full: the number of the run's own batches per step at the end. 1 is plain training.
        growth: how the batch grows, in equal differences or in equal ratios.
        power: the exponent of the batch size in the learning rate. 0.5 suits Adam, 1 suits SGD, 0 replaces decay.
        by: how the batch grows. "accumulation" sums the gradients of micro-batches and needs the memory of one.
            "batch" concatenates them into one larger batch, which a GPU computes faster and BatchNorm sees as one. "rate"
            keeps the batch and divides the learning rate (see above).

    Raises:
        ValueError: for a value out of range. At setup, with Lightning's ``GradientAccumulationScheduler`` or
            ``StochasticWeightAveraging``, which change the windows too. At setup, for ``by="batch"`` with techniques that
            choose the samples of a batch. At the start of training, if an epoch has too few batches to grow. During training
            with ``by="batch"``, if batches have shapes that cannot be concatenated.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[BatchSizeWarmup(full=4, until=0.5)])

    References:
        Smith et al. 2017, "Don't Decay the Learning Rate, Increase the Batch Size", arXiv:1711.00489.
        Goyal et al. 2017, arXiv:1706.02677 (linear scaling). Malladi et al. 2022, arXiv:2205.10287 (square root, for Adam).
    """

    saves = "samples early in training, where small batches learn as much per step"
    paper = "Smith et al. 2017, arXiv:1711.00489"
    constraints = "needs more batches per epoch than the first steps take"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace(
        {"full": Choice((2, 3, 4)), "until": Uniform(0.2, 0.8), "power": Choice((0.0, 0.5, 1.0))}
    )
    control = Control(
        "a constant batch size, with the learning rate divided along the same path of learning rate / batch size",
        _decayed_rate,
    )
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"full": 1}

    def __init__(
        self,
        start: Annotated[int, Count()] = 1,
        until: Annotated[float, Fraction(above=0)] = 0.5,
        *,
        steps: Annotated[int, Count()] | None = None,
        full: Annotated[int, Count()] = 4,
        growth: Literal["linear", "geometric"] = "linear",
        power: Annotated[float, Number(at_least=0, at_most=2)] = 0.5,
        by: Literal["accumulation", "batch", "rate"] = "accumulation",
    ) -> None:
        if full < start or (full == start and full > 1):
            raise ValueError(
                f"{WHO}({start=}, {full=}): full must be above start, because the batch grows from one to the other. For a"
                " larger batch throughout, set Trainer(accumulate_grad_batches=...)."
            )
        self.sizes = batch_sizes(start, full, steps, growth)
        if steps is not None and full > 1 and len(self.sizes) != steps + 1:
            raise ValueError(
                f"{WHO}({start=}, {full=}, {steps=}): {growth} growth from {start} to {full} batches has only"
                f" {len(self.sizes) - 1} increases by whole batches. Set steps={len(self.sizes) - 1} or less."
            )
        self.start, self.until, self.full, self.power = start, until, full, power
        self.by: Literal["accumulation", "batch", "rate"] = by
        self.settings = {"start": start, "until": until, "steps": steps, "full": full, "growth": growth, "power": power}
        self._scaled: ScaledSteps | None = None

    def _reset(self) -> None:
        self._own = 0  # the trainer's accumulate_grad_batches
        self._m = self.start
        self._joining: dict[int, Any] = {}  # by="batch": the loader's batches that wait, by index in the epoch
        self._saved: dict[int, Any] = {}  # the same from a checkpoint, in plain containers

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
                    " accumulate_grad_batches. Remove one of them from the trainer's callbacks."
                )

    @override
    def attach(self, session: Session) -> None:
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
        """Return the mean samples per optimizer step, if the budget counts samples: ``1 / mean_u(1 / m)``."""
        rises = len(self.sizes) - 1
        inverse = sum(self.until / rises / m for m in self.sizes[:-1]) + (1 - self.until) / self.sizes[-1]
        return 1 / inverse

    @override
    def on_model(self, session: Session) -> None:
        other = session.loaders.taken_by or session.loaders.told_to
        if self.by == "batch" and other:
            raise ValueError(
                f"{WHO}(by='batch') and {other} cannot train together: {other} chooses, or must know, the samples"
                " of each batch. Use by='accumulation'."
            )

    @override
    def on_optimizers(self, session: Session) -> None:
        self._scaled = ScaledSteps(session.optimizers, lambda: self.rate_factor)

    @property
    def rate_factor(self) -> float:
        """The factor of the current step's learning rate."""
        # learning rate / batch size is the same either way
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
                f"{WHO}(start={self.start}): an epoch has {batches:,.0f} batches and the first steps take"
                f" {self._own * self.start} each, so the batch cannot grow. Lower the loader's batch_size, start or the"
                " Trainer's accumulate_grad_batches."
            )
        if batches < self._own * self.full:
            rank_zero_info(
                f"{WHO}(full={self.full}): an epoch has {batches:,.0f} batches, fewer than the {self._own * self.full} of a"
                " full step. The largest step takes the whole epoch."
            )

    # -- by="batch"

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Hold batches until there are ``m``, then run the step on their concatenation."""
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
                    f"{WHO}(by='batch'): {error} Use by='accumulation', which keeps batches separate."
                ) from error
        output = proceed(batch)
        # Lightning divides by the window, but this loss is already the mean of its m batches
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
            return f"the learning rate was divided by up to {1 / self.rate_factor:.3g}, with the batch size unchanged"
        return (
            f"the last step took {self._own * self._m} of the loader's batches, at {self.rate_factor:.3g} times the"
            " learning rate"
        )
