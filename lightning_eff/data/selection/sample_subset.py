"""Train on the samples of a data set that a selection before training wrote to a file (DSIR: Xie et al. 2023)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Either, Fraction
from lightning_eff._core._arguments.objects import FilePath
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.technique import Choice, Epoch, SampleChooser
from lightning_eff._core.search_space import RunProfile, SearchSpace, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._offline.files import read
from lightning_eff.data.selection._subset import check_told, of_subset, random_subset

WHO = "SampleSubset"


def _as_many(technique: "SampleSubset") -> Mapping[str, Callback]:
    """Draw as many samples at random, the same ones for the whole run."""
    if technique.told is None:
        return {}
    share = len(technique.told.values) / technique.told.num_samples
    return {} if share == 1 else {"as many samples, at random": SampleSubset(share)}


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.epochs >= 1 else "the run does not see all of its data even once"


class SampleSubset(SampleChooser):
    """Train on a part of the data set: the samples whose indices a file lists, or a random fraction.

    The loader, its sampler and its order stay. Samples outside the subset are skipped, and the rest is cut into new batches
    over all ranks. Batches that a custom batch sampler builds are not kept together.

    Use it after a selection such as ``lightning-eff select dsir``, or to train on a random subset. Epochs are shorter: a run of
    a fixed number of epochs takes less time, and a run of a fixed number of steps or seconds sees each sample more often.
    Schedules that ask the Trainer for the number of steps count the whole data set, so set ``max_steps``. If a last batch of
    one sample is too small (for example for BatchNorm), use ``drop_last`` in the loader.

    ``lightning-eff select`` writes the file, or you do. A ``.json`` file looks like this:

        {"num_samples": 6, "fingerprint": null, "indices": [0, 2, 5]}

    ``num_samples`` is the length of the data set. ``indices`` lists each sample once. ``fingerprint`` is a hash of some samples
    that identifies the data set, or null. A ``.npz`` file holds arrays with these names.

    A random subset follows from the run's seed and stays the same for the whole run.

    It logs ``samples`` (the size of the subset) and ``share`` (its fraction of the data set).

    Args:
        samples: the samples to train on. Give the path of a file of indices, or the fraction of the data set to draw at random
            (``round(samples * N)`` samples, at least one). 1.0 is plain training.

    Raises:
        ValueError: for a fraction out of range, or a file that is missing, malformed, or has repeated or invalid indices.
            Before the first step, on all ranks, if the file belongs to another data set (by its length or fingerprint), or if
            the loader's sampler yields no sample of the subset.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SampleSubset(0.3)])  # or SampleSubset("selected.npz")

    References:
        Xie et al. 2023, "Data Selection for Language Models via Importance Resampling", arXiv:2302.03169 (DSIR), which
        ``lightning-eff select dsir`` implements.
    """

    saves = "steps on samples that a selection before training removed"
    paper = "Xie et al. 2023, arXiv:2302.03169"
    constraints = "needs one DataLoader over a map-style data set"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace({"samples": Uniform(0.3, 0.9)}, _pointless)
    control = Control(
        "as many samples at random, the same ones for the whole run; for a random subset, the baseline for as many seconds",
        _as_many,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "DifficultyPacing": "both choose the samples of an epoch",
        "TokenBudgetBatches": "both choose the samples of an epoch",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    checkpointed = ("_samples", "_size")

    def __init__(
        self,
        samples: Annotated[float | str | Path, Either(FilePath("the path of a file of indices"), Fraction(above=0))],
    ) -> None:
        self.told = read(samples, "indices", who=WHO) if isinstance(samples, str | Path) else None
        self.share = samples if isinstance(samples, int | float) else 1.0

    def _reset(self) -> None:
        self._kept: Tensor | None = None
        self._samples = self._size = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.told is None and self.share == 1.0

    @override
    def choose(self, epoch: Epoch) -> Choice | None:
        if self._kept is None or self._size != epoch.size:
            self._kept, self._size = self._found(epoch.size), epoch.size
            self._samples = len(self._kept)
        return of_subset(epoch, self._kept, who=WHO)

    def _found(self, size: int) -> Tensor:
        if self.told is None:
            return random_subset(size, max(1, round(self.share * size)), self.session.generator(WHO))
        check_told(self.session, self.told, who=WHO)
        return torch.from_numpy(self.told.values)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"samples": self._samples, "share": self._samples / max(self._size, 1)}

    @override
    def summary(self) -> str:
        if not self._size:
            return "no step taken"
        where = "drawn at random" if self.told is None else f"from {self.told.path}"
        return f"trained on {self._samples:,} of {self._size:,} samples, {where}"
