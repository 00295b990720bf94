"""A window of the latest snapshots of the weights, taken once per epoch or every few steps."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Fraction, OneOf
from lightning_eff._core._optim.tensors import piece
from lightning_eff._core._run.delayed_start import ActsLate, Length
from lightning_eff._core.session import Session
from lightning_eff.optim.averaging._engine import AveragedWeights

#: when a snapshot is taken
Interval = Annotated[Literal["epoch"] | int, Either(OneOf("epoch"), Count())]
Start = Annotated[float, Fraction()]


class SnapshotWindow(ActsLate, AveragedWeights):
    """A weight average over the last ``window`` snapshots of the trained weights.

    Attributes:
        window: the number of snapshots kept.
        interval: "epoch", or the number of optimizer steps between two snapshots.
        start: the fraction of the budget before which no snapshot is taken.
        offload: whether the snapshots are kept in CPU memory.
        fewest: the smallest number of snapshots that can be averaged.
    """

    fewest: ClassVar[int] = 1
    neutral_at: ClassVar[Mapping[str, Any]] = {"start": 1.0}
    constraints: ClassVar[str] = "keeps window + 1 copies of the weights; BatchNorm needs automatic optimization"
    window: int
    interval: Literal["epoch"] | int
    start: float
    offload: bool

    @override
    def _reset(self) -> None:
        super()._reset()
        self._snapshots: deque[dict[str, Tensor]] = deque()

    # -- the run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        if self.start > 0.0:
            self.check_budget(session, f"start={self.start}", "start=0.0")

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        trainer = session.trainer
        if self.interval == "epoch":
            due = trainer.is_last_batch
        else:
            due = trainer.global_step // self.interval > self._step // self.interval
        if due and session.progress.u >= self.start:
            self._take(session)

    # -- snapshots

    @torch.no_grad()
    def _take(self, session: Session) -> None:
        held = self._snapshots[-1] if self._snapshots else {}
        while len(self._snapshots) >= self.window:
            self._snapshots.popleft()
        self._snapshots.append(
            {
                name: piece(p).to("cpu" if self.offload else p.device, copy=True)
                for name, p in self.tensors(session).parameters.items()
                if p.requires_grad or name in held
            }
        )
        self.outdate(session)

    @property
    @override
    def names(self) -> Iterable[str]:
        return self._snapshots[-1] if self._snapshots else ()

    @override
    def forget(self) -> None:
        self._snapshots.clear()

    @override
    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        if not self.offload:
            for snapshot in self._snapshots:
                snapshot.update({name: w.to(devices[name]) for name, w in snapshot.items()})

    @override
    def saved(self) -> dict[str, Any]:
        return {"snapshots": [dict(snapshot) for snapshot in self._snapshots]}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        snapshots = state["snapshots"]
        self._snapshots = deque(dict(snapshot) for snapshot in snapshots[-self.window :])
        if len(snapshots) > self.window:
            self._statistics = None

    @override
    def saved_weights(self, state: dict[str, Any]) -> Mapping[str, Tensor]:
        return state["snapshots"][-1] if state["snapshots"] else {}

    # -- what a run is too short for

    @property
    @override
    def acted(self) -> bool:
        return self._taken >= self.fewest

    @override
    def will_act(self, length: Length) -> bool:
        every = length.epoch if self.interval == "epoch" else self.interval
        return length.times(every, start=self.start) >= self.fewest

    @override
    def idle(self, length: Length) -> str:
        every = length.epoch if self.interval == "epoch" else self.interval
        which = f"snapshot {self.fewest}" if self.fewest > 1 else "the first snapshot"
        known = math.isfinite(every)
        after = f" after {length.first(every, self.start) + (self.fewest - 1) * every:,}" if known else " later"
        start = f", start={self.start}" if self.start else ""
        return (
            f"{which} would be taken{after} (interval={self.interval!r}{start}), so nothing will be averaged. Set interval= to"
            " a"
            f" smaller number of steps{', or an earlier start=' if start else ''}."
        )
