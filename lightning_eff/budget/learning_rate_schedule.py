"""Schedule the learning rate over the run's budget in steps, epochs, tokens or seconds, in any shape.

Li et al. 2019 (arXiv:1905.04753): the progress variable matters more than the shape, and must be the budget.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Each, Fraction, Number, OneOf
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.learning_rates import Rates
from lightning_eff._core.batches import num_tokens
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.budget._shapes import RAMPS, SHAPES, Shape


def _linear(technique: Any) -> Mapping[str, Technique]:
    if technique.shape.name in ("linear", "constant"):
        return {}
    shape = technique.shape
    warmup = 0.0 if shape.name == "one_cycle" else shape.warmup
    return {"linear": LearningRateSchedule("linear", warmup=warmup, max_tokens=technique.max_tokens)}


class LearningRateSchedule(Technique):
    """Schedule the learning rate over the run's whole budget, in one of nine shapes.

    The learning rate of each parameter group is its highest value times ``shape(u)``. ``u`` is the used fraction of the
    budget: of ``max_steps``, ``max_epochs`` or ``max_time``, whichever ends the run first, or of ``max_tokens``. The schedule
    therefore ends with the run, within one step, at any machine speed and also after a resume. The value is computed before
    each optimizer step and holds for all its micro-batches.

    Use it where the module has no schedule, or one that does not decay by the end of the run. It costs nothing. It replaces
    the module's own schedule: the schedulers stay where the module may look for them, but have no effect. A group's highest
    learning rate is that of the module's optimizer, or the highest value of a replaced cycle. It is read when training
    begins, so the result of ``lr_find`` counts. A resumed run takes it from the checkpoint.

    It logs ``factor``, the value of the shape, ``rate``, the highest learning rate of the groups, and with ``max_tokens`` the
    ``tokens`` so far.

    Args:
        shape: the shape of the schedule. "esd" is elastic step decay, "clr" is triangles, "sgdr" is cosines with warm
            restarts, "wsd" is warm-up, constant, decay.
        warmup: the fraction of the run over which the learning rate rises linearly before the shape begins. Not for
            "one_cycle", which has its own rise.
        final: the learning rate at the end (and the lowest of "clr" and "sgdr") as a fraction of the highest.
        start: the learning rate at the beginning of warm-up or of "one_cycle", as a fraction of the highest. None is 1/25 for
            "one_cycle" and 0 otherwise.
        peak: the fraction of the run at which "one_cycle" is highest. Also accepted as ``pct_start``.
        ramp: how "one_cycle" rises and falls, and how "wsd" falls. None is "linear" for "wsd" and "cosine" otherwise.
        decay: the fraction of the run after warm-up in which "wsd" decays.
        cycles: the number of cycles of "clr" and "sgdr".
        cycle_growth: the ratio of each "sgdr" cycle's length to the previous one's. Also accepted as ``T_mult``.
        momentum: the lowest and highest momentum of "one_cycle". It applies to groups with a momentum, or to their first
            beta, and is lowest where the learning rate is highest. None leaves it unchanged.
        max_tokens: the run's budget in tokens over all ranks, at which the run ends. Tokens are the elements of a batch's
            first 2-D integer tensor.

    Raises:
        ValueError: for a value out of range. At setup, for a Trainer without an end, manual optimization, or with Lightning's
            ``StochasticWeightAveraging``. With ``max_tokens``, if the first batch has no tokens.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LearningRateSchedule("cosine", warmup=0.02)])

    References:
        Li et al. 2019, "Budgeted Training", arXiv:1905.04753. Goyal et al. 2017, arXiv:1706.02677 (warm-up).
        Izsak et al. 2021, arXiv:2104.07705 (a budget in seconds).
    """

    saves = "steps: full decay over the true budget gains more than most techniques"
    paper = "Li et al. 2019, arXiv:1905.04753; Bergsma et al. 2025, arXiv:2502.15938"
    constraints = "needs a run with an end and automatic optimization"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace(
        {
            "shape": Choice(("linear", "cosine", "rex", "wsd")),
            "warmup": Choice((0.0, 0.02, 0.1)),
            "final": Choice((0.0, 0.1)),
        }
    )
    control = Control(
        "a linear decay to zero over the same budget; for linear decay, the baseline with a tuned learning rate",
        _linear,
    )
    needs_optimizer: ClassVar[bool] = True
    sets_rates: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        shape: Annotated[str, OneOf(*SHAPES)] = "linear",
        warmup: Annotated[float, Fraction(below=1)] = 0.0,
        final: Annotated[float, Fraction()] = 0.0,
        *,
        start: Annotated[float, Fraction()] | None = None,
        peak: Annotated[float, Fraction(above=0, below=1), Alias("pct_start")] = 0.3,
        ramp: Annotated[str, OneOf(*RAMPS)] | None = None,
        decay: Annotated[float, Fraction()] = 0.2,
        cycles: Annotated[int, Count()] = 4,
        cycle_growth: Annotated[float, Number(at_least=1), Alias("T_mult")] = 2.0,
        momentum: Annotated[tuple[float, float], Each(Fraction(below=1), length=2)] | None = (0.85, 0.95),
        max_tokens: Annotated[int, Count()] | None = None,
    ) -> None:
        if warmup and shape == "one_cycle":
            raise ValueError(
                f"LearningRateSchedule(shape='one_cycle', warmup={warmup}): one cycle has its own rise. Set warmup=0 and"
                " choose its length with peak=."
            )
        if momentum is not None and momentum[0] > momentum[1]:
            raise ValueError(
                f"LearningRateSchedule(momentum={momentum}): the first value must be the lower one. Write"
                f" momentum={momentum[::-1]}."
            )
        if start is None:
            start = 1 / 25 if shape == "one_cycle" else 0.0
        if ramp is None:
            ramp = "linear" if shape == "wsd" else "cosine"
        self.shape = Shape(shape, warmup, start, final, peak, ramp, decay, cycles, cycle_growth)
        self.momentum = momentum if shape == "one_cycle" else None
        self.max_tokens = max_tokens

    def _reset(self) -> None:
        self._rates = Rates("LearningRateSchedule")
        self._tokens = 0
        self._last: dict[str, float | int] = {}

    # -- the run

    @override
    def on_budget(self, session: Session) -> None:
        session.progress.max_tokens = self.max_tokens

    @override
    def check(self, session: Session) -> None:
        if not session.progress.limits():
            raise ValueError(
                "LearningRateSchedule: the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so there is no"
                " budget to schedule over. Set max_steps, max_epochs or max_time, or LearningRateSchedule(max_tokens=...)."
            )
        for other in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_a(other, StochasticWeightAveraging):
                raise ValueError(
                    "LearningRateSchedule and StochasticWeightAveraging cannot train together: both set the learning"
                    " rate. Remove one of them, or use LatestWeightAveraging instead."
                )

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        self._rates.foreign = state is None

    @override
    def attach(self, session: Session) -> None:
        self._rates.take_over(session, f"LearningRateSchedule: {self.shape.name}")

    @override
    def on_optimizers(self, session: Session) -> None:
        self._rates.made(session)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._session is not None and not self.neutral:
            self._rates.begin(self._session)  # before a hook of a batch can change the learning rate

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        factor = self.shape(session.progress.u)
        rate = self._rates.set(session, factor)
        if self.momentum is not None:
            momentum = self.shape.momentum(session.progress.u, *self.momentum)
            for group in (group for optimizer in session.optimizers for group in optimizer.param_groups):
                _set_momentum(group, momentum)
        self._last = {"factor": factor, "rate": rate}
        if self.max_tokens is not None:
            self._count(session, batch)
            self._last["tokens"] = self._tokens

    def _count(self, session: Session, batch: Any) -> None:
        found = num_tokens(batch)
        if not found and not self._tokens:
            raise ValueError(
                f"LearningRateSchedule(max_tokens={self.max_tokens}): the first batch, a {type(batch).__name__}, has no tokens"
                " (no 2-D integer tensor). Use Trainer(max_steps=...), max_epochs or max_time instead."
            )
        if session.replicas.count > 1:
            mean = torch.tensor(float(found), device=session.module.device)  # a sum may count each process of a replica
            found = round(float(session.trainer.strategy.reduce(mean, reduce_op="mean")) * session.replicas.count)
        self._tokens += found

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        session.progress.tokens = self._tokens
        if self.max_tokens is not None and self._tokens >= self.max_tokens:
            session.trainer.should_stop = True

    @override
    def detach(self, session: Session) -> None:
        self._rates.held.release()

    # -- what is kept

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"bases": self._rates.bases, "tokens": self._tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rates.load(state_dict["bases"])
        self._tokens = state_dict["tokens"]
        if self._session is not None:
            self._session.progress.tokens = self._tokens

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        if not self._last:
            return "made no step"
        tokens = f" after {self._tokens:,} of {self.max_tokens:,} tokens" if self.max_tokens is not None else ""
        return f"{self.shape.name}: the last learning rate was {self._last['factor']:.3g} times the highest{tokens}"


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if group.get("momentum"):
        group["momentum"] = momentum
    elif group.get("betas") and group["betas"][0]:
        group["betas"] = (momentum, *group["betas"][1:])
