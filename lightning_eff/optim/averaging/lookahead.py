"""Lookahead: slow weights that follow the optimizer's weights every k steps (Zhang et al. 2019)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core._optim.tensors import piece
from lightning_eff._core._run.delayed_start import ActsLate, Length
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import AveragedWeights, rivals


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
    """Move slow weights towards the optimizer's weights every ``interval`` steps, and restart the optimizer from them.

    The slow weights start as the weights of the run (or of a network that another technique has changed). After every
    ``interval`` optimizer steps they move the fraction ``alpha`` of the way to the trained weights, which are then set to
    the slow ones. The optimizer's own state is kept, as in the paper's experiments. It costs one more copy of the weights
    and almost no time.

    Validation, checkpoints and the end of fit use the slow weights, moved as if an interval ended now. The trained weights
    are in this callback's state, from which a resumed fit continues. Buffers, including BatchNorm's statistics, are those
    of training.

    Args:
        interval: the number of optimizer steps between two updates of the slow weights, ``k`` in the paper.
        alpha: the fraction of the way that the slow weights move. 1 is plain training.

    Raises:
        ValueError: for a value out of range. At setup, with another weight average.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Lookahead(interval=5, alpha=0.5)])

    References:
        Zhang et al. 2019, "Lookahead Optimizer: k steps forward, 1 step back", arXiv:1907.08610.
    """

    saves: ClassVar[str] = "steps, according to the paper: less noise in the weights at almost no cost"
    paper: ClassVar[str] = "Zhang et al. 2019, arXiv:1907.08610"
    constraints: ClassVar[str] = "keeps one more copy of the weights"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"interval": Choice((5, 10, 20)), "alpha": Uniform(0.3, 0.8)}
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero; step costs are about equal"
    )
    conflicts: ClassVar = rivals("ExponentialMovingAverage", "LatestWeightAveraging")
    neutral_at: ClassVar[Mapping[str, Any]] = {"alpha": 1.0}
    recomputes = False

    def __init__(
        self, interval: Annotated[int, Count()] = 5, *, alpha: Annotated[float, Fraction(above=0)] = 0.5
    ) -> None:
        self.interval = interval
        self.alpha = alpha

    @override
    def _reset(self) -> None:
        super()._reset()
        self._ahead = 0  # optimizer steps since the slow weights moved

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._begin(session)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        super().on_blocks_changed(session)
        self._ahead = 0
        self._begin(session)  # at once, so that the order of techniques does not matter

    @torch.no_grad()
    def _begin(self, session: Session) -> None:
        """Start slow weights for parameters that have none, at their current values."""
        for name, p in self.tensors(session).parameters.items():
            if name not in self._held and p.requires_grad:
                self._held[name] = piece(p).to(torch.promote_types(p.dtype, torch.float32), copy=True)

    @override
    @torch.no_grad()
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if not self.stepped(session):
            return
        self._ahead += 1
        if self._ahead < self.interval:
            return
        self._ahead = 0
        now = self.pieces(session)
        for name, slow in self.average(session):
            self._held[name] = slow
            now[name].copy_(slow)
        self.outdate(session)

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        now = self.pieces(session)
        for name, slow in self._held.items():
            yield name, slow_step(slow, now[name], alpha=self.alpha)

    @override
    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "ahead": self._ahead}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._ahead = state["ahead"]

    # -- what it reports

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
            f"the slow weights move every {self.interval:,} steps, so training never restarts from them, and the final weights"
            f" are {self.alpha:.0%} of the way from the first to the last. Set a smaller interval=."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"slow_steps": self._taken}

    @override
    def summary(self) -> str:
        return f"moved the slow weights {self._taken:,} times, every {self.interval} steps, by {self.alpha:g} of the distance"
