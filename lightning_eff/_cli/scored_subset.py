"""Data pruning without training: the run ends before its first step with what would be kept."""

from typing import Any

import torch
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._samples.technique import Choice, Epoch
from lightning_eff.data.selection._offline.files import fingerprint
from lightning_eff.data.selection.data_pruning import DataPruning


class Scored(Exception):
    """Ends the run.

    Attributes:
        kept: the indices that are kept, shape (m,), ascending.
        num_samples: the data set's length.
        fingerprint: of the data set.
    """

    def __init__(self, kept: torch.Tensor, num_samples: int, fingerprint: str) -> None:
        super().__init__("the samples are scored")
        self.kept, self.num_samples, self.fingerprint = kept, num_samples, fingerprint


class ScoreOnly(DataPruning):
    """:class:`DataPruning` before the first epoch, which does not come."""

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
