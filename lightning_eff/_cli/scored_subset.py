"""Data pruning without training: the run ends before its first step and returns the indices to keep."""

from typing import Any

import torch
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._samples.technique import Choice, Epoch
from lightning_eff.data.selection._offline.files import fingerprint
from lightning_eff.data.selection.data_pruning import DataPruning


class Scored(Exception):
    """Raised to end the run after scoring.

    Attributes:
        kept: the indices to keep, shape (m,), ascending.
        num_samples: length of the data set.
        fingerprint: fingerprint of the data set.
    """

    def __init__(self, kept: torch.Tensor, num_samples: int, fingerprint: str) -> None:
        super().__init__("the samples are scored")
        self.kept, self.num_samples, self.fingerprint = kept, num_samples, fingerprint


class ScoreOnly(DataPruning):
    """:class:`DataPruning` that raises :class:`Scored` instead of starting the first epoch."""

    def __init__(self, score: str, keep: float, **settings: Any) -> None:
        super().__init__(score, keep, epochs=0, **settings)

    @override
    def choose(self, epoch: Epoch) -> Choice | None:
        super().choose(epoch)
        loader, kept = self.session.loaders.latest, self.state_dict()["kept"]
        assert loader is not None
        with rng.keyed(0, "select", "fingerprint"):
            told = fingerprint(loader.dataset)
        raise Scored(kept, epoch.size, told)
