"""Lookahead: slow weights that follow the optimizer's, k steps at a time (Zhang et al. 2019)."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._run.late import ActsLate, Length
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import AveragedWeights, is_count, pieces, rivals


@torch.no_grad()
def slow_step(slow: Tensor, fast: Tensor, *, alpha: float) -> Tensor:
    """``phi + alpha (theta - phi)``, in the dtype of ``phi``.

    Args:
        slow: ``phi``.
        fast: ``theta``, of the shape of ``slow``.
        alpha: in (0, 1].
    """
    # φ ← φ + α (θ − φ)
    return torch.lerp(slow, fast.to(slow.dtype), alpha)


class Lookahead(ActsLate, AveragedWeights):
    """Let the optimizer run ahead for ``interval`` steps, go a part of the way, and let it start again from there.

    The slow weights are those that the run, or a network that has changed, starts with. After every ``interval`` optimizer
    steps they go the share ``alpha`` of the way to the trained ones, which are then set to them. The optimizer's own state
    goes on as it is, as in the paper's experiments.

    What validation and checkpoints see, and what fit leaves behind, are the slow weights: those that would be if they went
    their share now, which after each ``interval`` steps are the trained ones. The trained weights are in this callback's
    state, and a resumed fit goes on from them. Buffers, BatchNorm's statistics among them, are the trained network's.

    Args:
        interval: ``k``, optimizer steps between two of the slow weights, >= 1.
        alpha: the share of the way, in (0, 1]. 1 is plain training.

    Raises:
        ValueError: for other values; at setup, beside another weight averaging.

    Sources:
        Zhang et al. 2019, arXiv:1907.08610.
    """

    saves: ClassVar[str] = "steps, by the paper's claim: less noise in the weights at hardly any cost"
    paper: ClassVar[str] = "Zhang et al. 2019, arXiv:1907.08610"
    constraints: ClassVar[str] = "one more copy of the weights"
    survey: ClassVar[Survey | None] = Survey("Lookahead", shen="5.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"interval": Choice((5, 10, 20)), "alpha": Uniform(0.3, 0.8)}
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs about the same"
    )
    conflicts: ClassVar = rivals("ExponentialMovingAverage", "LatestWeightAveraging")
    recomputes = False

    def __init__(self, interval: int = 5, *, alpha: float = 0.5) -> None:
        if not is_count(interval):
            raise ValueError(f"Lookahead({interval=}): expected a number of optimizer steps >= 1. 5 is the paper's.")
        if not 0.0 < alpha <= 1.0:
            raise ValueError(
                f"Lookahead({alpha=}): expected a number in (0, 1], the share of the way to the trained weights; 1 is plain"
                " training."
            )
        self.interval = interval
        self.alpha = alpha
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._ahead = 0  # optimizer steps since the slow weights went

    @property
    @override
    def neutral(self) -> bool:
        return self.alpha == 1.0

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._begin(session)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        super().on_blocks_changed(session)
        self._ahead = 0
        self._begin(session)  # at once, so that the order of techniques does not count

    @torch.no_grad()
    def _begin(self, session: Session) -> None:
        """Let parameters that have no slow weights get some where they are."""
        fresh = [n for n, p in session.module.named_parameters() if p.requires_grad and n not in self._held]
        now = pieces(session) if fresh else {}
        for name in fresh:
            self._held[name] = now[name].to(torch.promote_types(now[name].dtype, torch.float32), copy=True)

    @override
    @torch.no_grad()
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if not self.stepped(session):
            return
        self._ahead += 1
        if self._ahead < self.interval:
            return
        self._ahead = 0
        now = pieces(session)
        for name, slow in self.average(session):
            self._held[name] = slow
            now[name].copy_(slow)
        self.outdate(session)

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        now = pieces(session)
        for name, slow in self._held.items():
            yield name, slow_step(slow, now[name], alpha=self.alpha)

    @override
    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "ahead": self._ahead}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._ahead = state["ahead"]

    # -- what it tells

    @property
    @override
    def acted(self) -> bool:
        return self._taken > 0

    @override
    def will_act(self, length: Length) -> bool:
        return length.times(self.interval) > 0

    @override
    def idle(self, length: Length) -> str:
        return (
            f"the slow weights go after every {self.interval:,}, so training never starts again from them, and what it leaves"
            f" is {self.alpha:.0%} of the way from the first weights to the last. Give a smaller interval=."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"slow_steps": self._taken}

    @override
    def summary(self) -> str:
        return f"the slow weights went {self._taken:,} times, every {self.interval} steps {self.alpha:g} of the way"
