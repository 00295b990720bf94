"""What a case of the comparison consists of."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

__all__ = ["Arm", "Case"]


@dataclass(frozen=True)
class Arm:
    """One of the two sides of a case."""

    step: Callable[[], object]  #: one unit of work; the arms are called in turns
    state: Callable[[], Iterable[torch.Tensor]] = (
        tuple  #: tensors that the arm keeps, such as optimizer state or averages
    )


@dataclass(frozen=True)
class Case:
    """A technique of ours beside a peer that does the same work."""

    name: str  #: such as "Muon, width 256"
    technique: str  #: the public name in ``lightning_eff``, such as "Muon"
    peer: str  #: what it is compared with, such as "torch.optim.Muon"
    package: str  #: the distribution whose version is recorded, such as "torch"
    build: Callable[[], tuple[Arm, Arm]]  #: makes ours and the peer from the same seed; called once
    unit: str = "step"  #: what one call of an arm does
    goal: float | None = None  #: the time ratio (ours / peer) that we want, at most
    transient_goal: int | None = None  #: MiB of transient memory that one step of ours may take, at most
    rounds: int = 30  #: how often each arm is timed
    #: further figures by name, as pairs or single numbers, such as checkpoint bytes per parameter of ours and of the peer
    figures: Callable[[], dict[str, float]] | None = None
