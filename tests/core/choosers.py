"""Techniques of the tests that say which samples an epoch has."""

from typing import Any

import torch
from torch import Tensor

from lightning_eff._core._samples.scores import SampleScores
from lightning_eff._core._samples.technique import Choice, Epoch, SampleChooser
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control


class Some(SampleChooser):
    """Each epoch has a random share of its samples in the plain order, and another share in the next one."""

    saves = "samples"
    paper = "none"
    control = Control("of the tests alone: the baseline")

    def __init__(self, keep: float = 0.6, weight: float | None = None, grow: float = 0.0) -> None:
        self.keep, self.weight, self.grow = keep, weight, grow
        self.epochs: list[Epoch] = []

    @property
    def neutral(self) -> bool:
        return self.keep == 1.0

    def choose(self, epoch: Epoch) -> Choice | None:
        self.epochs.append(epoch)
        keep = min(1.0, self.keep + self.grow * epoch.number)
        drawn = torch.rand(epoch.size, generator=self.session.generator("Some", epoch.number))
        chosen = epoch.order[drawn[epoch.order] < keep]
        return Choice(chosen, None if self.weight is None else torch.full((len(chosen),), self.weight))

    def report(self) -> dict[str, Any]:
        return {"epochs": len(self.epochs)}


class Easier(SampleChooser):
    """After InfoBatch: of the samples with a loss below the mean half are left out, and the others' weights are doubled."""

    saves = "samples"
    paper = "after Qin et al. 2023"
    control = Control("of the tests alone: the baseline")
    wants_losses = True

    def __init__(self) -> None:
        self.scores = SampleScores()
        self._seen = 0

    def attach(self, session: Session) -> None:
        self.scores, self._seen = SampleScores(), 0

    def choose(self, epoch: Epoch) -> Choice | None:
        scores = self.scores.merge(epoch.size, self.session.gather)
        easy = scores < scores.nanmean()
        drawn = torch.rand(epoch.size, generator=self.session.generator("Easier", epoch.number))
        kept = epoch.order[~(easy & (drawn < 0.5))[epoch.order]]
        return Choice(kept, torch.where(easy[kept], 2.0, 1.0))

    def on_losses(self, indices: list[int], losses: Tensor) -> None:
        self.scores.update(indices, losses)
        self._seen += len(indices)

    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        assert session is not None
        return {"scores": self.scores.state_dict(session.gather), "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores.load_state_dict(state_dict["scores"], self.session.rank)
        self._seen = state_dict["seen"]

    def report(self) -> dict[str, Any]:
        return {"seen": self._seen}


class Again(Some):
    """Turns round what is to come of the epoch after each of these steps."""

    at = (2, 7)

    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if session.trainer.global_step in self.at:
            self.choose_again()

    def choose(self, epoch: Epoch) -> Choice | None:
        if epoch.left is None:
            return super().choose(epoch)
        assert epoch.left == len(epoch.order)
        return Choice(epoch.order.flip(0))
