"""A learning rate that is spent on the run's own budget, in steps, epochs, tokens or seconds, in any shape.

Li et al. 2019 (arXiv:1905.04753): what the progress variable is counts for more than the shape; it must be the budget.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.rates import Rates
from lightning_eff._core.batches import num_tokens
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
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
    """Let every group's rate be its highest one times a shape of ``u``, the share of the run's budget that is used up.

    ``u`` is of the Trainer's own limit, whichever of ``max_steps``, ``max_epochs`` and ``max_time`` ends the run first, or of
    ``max_tokens``: the rate is at its end when the run is, within one step, whatever the machine's speed, and also after a
    resume. It is read before each optimizer step and holds for all micro-batches of it.

    The shape takes the place of the module's own schedule where there is one: its schedulers stay where the module may look
    for them, and do nothing. A group's highest rate is that of the module's optimizer, or the highest that a replaced cycle
    names. It is taken as training begins, so what ``lr_find`` set counts; a resumed run goes on with that of its checkpoint.

    Logged: ``factor``, the shape's value, ``rate``, the highest of the groups' rates, and with ``max_tokens`` the ``tokens``
    so far.

    Args:
        shape: "linear", "cosine", "rex", "esd" (elastic steps), "one_cycle", "clr" (triangles), "sgdr" (cosines with warm
            restarts), "wsd" (constant, then a decay) or "constant".
        warmup: the share of the run, in [0, 1), over which the rate rises linearly, before the shape; not for "one_cycle",
            which rises by itself.
        final: the rate at the end, and the lowest of "clr" and "sgdr", as a fraction of the highest, in [0, 1].
        start: the rate at the beginning of warm-up, or of "one_cycle", likewise; None for 0, or 1/25 of one cycle.
        peak: of "one_cycle": the share of the run at its highest rate, in (0, 1).
        ramp: "cosine" or "linear": how "one_cycle" rises and falls, and "wsd" falls; None for cosine, and linear for "wsd".
        decay: of "wsd": the share of what follows warm-up in which it falls, in [0, 1].
        cycles: of "clr" and "sgdr", >= 1.
        cycle_growth: of "sgdr": how much longer each cycle is than the one before, >= 1.
        momentum: of "one_cycle": (lowest, highest), both in [0, 1): momentum, or the first of the betas, of groups that have
            any, lowest where the rate is highest. None leaves them.
        max_tokens: the run's budget in tokens of all ranks, as the loader hands them out (elements of a batch's first 2-D
            integer tensor), >= 1; the run ends with it.

    Raises:
        ValueError: for other values; at setup, for a Trainer without an end, manual optimization, or beside Lightning's
            ``StochasticWeightAveraging``; with ``max_tokens``, for a first batch that has none.

    Sources:
        Li et al. 2019, arXiv:1905.04753 (the budget); the shapes' own are in ``_shapes``; Goyal et al. 2017,
        arXiv:1706.02677 (warm-up); Izsak et al. 2021, arXiv:2104.07705 (seconds).
    """

    saves: ClassVar[str] = "steps: a rate decayed wholly on the true budget is worth more than most techniques"
    paper: ClassVar[str] = "Li et al. 2019, arXiv:1905.04753; Bergsma et al. 2025, arXiv:2502.15938"
    constraints: ClassVar[str] = "a run that has an end; automatic optimization"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("learning rate schedules", zhuang="2.1", shen="5.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "shape": Choice(("linear", "cosine", "rex", "wsd")),
            "warmup": Choice((0.0, 0.02, 0.1)),
            "final": Choice((0.0, 0.1)),
        }
    )
    control: ClassVar[Control] = Control(
        "a linear decay to zero on the same budget; for that one, the baseline with its rate tuned as long", _linear
    )
    needs_optimizer: ClassVar[bool] = True
    sets_rates: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        shape: str = "linear",
        warmup: float = 0.0,
        final: float = 0.0,
        *,
        start: float | None = None,
        peak: float = 0.3,
        ramp: str | None = None,
        decay: float = 0.2,
        cycles: int = 4,
        cycle_growth: float = 2.0,
        momentum: tuple[float, float] | None = (0.85, 0.95),
        max_tokens: int | None = None,
    ) -> None:
        def refuse(name: str, got: object, expected: str) -> None:
            raise ValueError(f"LearningRateSchedule({name}={got!r}): expected {expected}.")

        if shape not in SHAPES:
            refuse("shape", shape, f"one of {', '.join(SHAPES)}")
        if not 0.0 <= warmup < 1.0:
            refuse("warmup", warmup, "a share of the run in [0, 1)")
        if warmup and shape == "one_cycle":
            refuse("warmup", warmup, "0 with shape='one_cycle', which rises by itself until peak")
        if not 0.0 <= final <= 1.0:
            refuse("final", final, "a fraction of the highest rate in [0, 1]")
        if start is not None and not 0.0 <= start <= 1.0:
            refuse("start", start, "a fraction of the highest rate in [0, 1], or None")
        if not 0.0 < peak < 1.0:
            refuse("peak", peak, "a share of the run in (0, 1)")
        if ramp not in (None, *RAMPS):
            refuse("ramp", ramp, f"one of {', '.join(RAMPS)}, or None")
        if not 0.0 <= decay <= 1.0:
            refuse("decay", decay, "a share of the run in [0, 1]")
        if isinstance(cycles, bool) or not isinstance(cycles, int) or cycles < 1:
            refuse("cycles", cycles, "an integer >= 1")
        if not 1.0 <= cycle_growth < math.inf:
            refuse("cycle_growth", cycle_growth, "a number >= 1")
        if momentum is not None and not (len(momentum) == 2 and 0.0 <= momentum[0] <= momentum[1] < 1.0):
            refuse("momentum", momentum, "(lowest, highest), both in [0, 1), or None")
        if max_tokens is not None and (
            isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1
        ):
            refuse("max_tokens", max_tokens, "an integer >= 1, or None")
        if start is None:
            start = 1 / 25 if shape == "one_cycle" else 0.0
        if ramp is None:
            ramp = "linear" if shape == "wsd" else "cosine"
        self.shape = Shape(shape, warmup, start, final, peak, ramp, decay, cycles, cycle_growth)
        self.momentum = momentum if shape == "one_cycle" else None
        self.max_tokens = max_tokens
        self._reset()

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
                " budget to spend the rate on. Set one of max_steps, max_epochs and max_time, or max_tokens= here."
            )
        for other in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_a(other, StochasticWeightAveraging):
                raise ValueError(
                    "LearningRateSchedule and StochasticWeightAveraging cannot train together: both set the rate. Take one"
                    " of them out of the trainer's callbacks, or use LatestWeightAveraging."
                )

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        self._rates.foreign = state is None

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        self._rates.take_over(session, f"LearningRateSchedule: {self.shape.name}")

    @override
    def on_optimizers(self, session: Session) -> None:
        self._rates.made(session)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._session is not None and not self.neutral:
            self._rates.begin(self._session)  # before any hook of a batch can write others

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
                f"LearningRateSchedule(max_tokens={self.max_tokens}): the first batch, a {type(batch).__name__}, has no tokens;"
                " expected a 2-D integer tensor in it. Give the Trainer max_steps, max_epochs or max_time instead."
            )
        if session.replicas.count > 1:
            mean = torch.tensor(
                float(found), device=session.module.device
            )  # a sum may count a replica's processes each
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
            return "no step was made"
        tokens = f" after {self._tokens:,} of {self.max_tokens:,} tokens" if self.max_tokens is not None else ""
        return f"{self.shape.name}: the last step's rate was {self._last['factor']:.3g} of the highest{tokens}"


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if group.get("momentum"):
        group["momentum"] = momentum
    elif group.get("betas") and group["betas"][0]:
        group["betas"] = (momentum, *group["betas"][1:])
