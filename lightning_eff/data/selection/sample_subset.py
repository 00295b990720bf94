"""Train on those samples of a data set that a selection before training left in a file (DSIR: Xie et al. 2023)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.technique import Choice, Epoch, SampleChooser
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._offline.files import Told, read
from lightning_eff.data.selection._subset import check_told, of_subset, random_subset

WHO = "SampleSubset"


def _as_many(technique: "SampleSubset") -> Mapping[str, Callback]:
    """As many samples at random, the same ones all along."""
    if technique.told is None:
        return {}
    share = len(technique.told.values) / technique.told.num_samples
    return {} if share == 1 else {"as many samples, at random": SampleSubset(share)}


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.epochs >= 1 else "the run does not see all of its data even once"


class SampleSubset(SampleChooser):
    """Train on some samples of the data set alone: those whose indices a file holds, or a random share of them.

    The user's own loader, sampler and order stay: of what its sampler gives in an epoch, the samples outside the subset are
    left out, and the rest is cut into batches anew, over all ranks. So epochs are shorter, and a run of so many epochs takes
    less time; one of so many steps or seconds sees each sample more often. What a custom batch sampler puts together is not
    kept together. Schedules that ask the Trainer before for how many steps there will be count the whole data set's, so say how
    long the run is by ``max_steps``; and where a last batch of one sample is too small (BatchNorm), give the loader
    ``drop_last``.

    The file is written by ``lightning-eff select`` or by hand. As ``.json`` it is

        {"num_samples": 6, "fingerprint": null, "indices": [0, 2, 5]}

    with the length of the data set; the indices, each once; and a fingerprint of some of the samples as the data set gives
    them, by which another data set of as many samples is told apart, or null. As ``.npz`` it holds arrays by these names.

    A share draws the subset from the run's seed, and it stays the same for the whole run: that is the control.

    Logged: ``samples``, how many there are in the subset, and ``share`` of the data set.

    Args:
        samples: the path of a file of indices, or a share of the data set in (0, 1], of which ``round(samples * N)`` samples
            (at least one) are drawn at random. 1.0 is plain training.

    Raises:
        ValueError: if the share is out of its range, or the file is not there, is of another form, or holds indices that
            stand twice or are out of range; before the first step, on all ranks, if it is of another data set, by its length
            or its fingerprint, or if the loader's sampler yields none of the subset.

    Sources:
        Xie et al. 2023, arXiv:2302.03169 (DSIR, which makes such a file: ``lightning-eff select dsir``).
    """

    saves: ClassVar[str] = "steps on samples that a selection before training left out"
    paper: ClassVar[str] = "Xie et al. 2023, arXiv:2302.03169"
    constraints: ClassVar[str] = "one DataLoader over a map-style data set"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("data selection before training (DSIR)", zhuang="2.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"samples": Uniform(0.3, 0.9)}, _pointless)
    control: ClassVar[Control] = Control(
        "as many samples at random, the same ones all along; of a random share itself, the baseline for as many seconds",
        _as_many,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "DifficultyPacing": "both say which samples an epoch has",
        "TokenBudgetBatches": "both say which samples an epoch has",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, samples: float | str | Path) -> None:
        self.told: Told | None = None
        self.share = 1.0
        if isinstance(samples, str | Path):
            self.told = read(samples, "indices", who=WHO)
        elif isinstance(samples, bool) or not isinstance(samples, int | float) or not 0 < samples <= 1:
            raise ValueError(
                f"{WHO}({samples!r}): expected the path of a file of indices, or a share of the data set in (0, 1], which is"
                " drawn at random. 1.0 is plain training."
            )
        else:
            self.share = float(samples)
        self._reset()

    def _reset(self) -> None:
        self._kept: Tensor | None = None
        self._samples = self._size = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.told is None and self.share == 1.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()

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
        where = "drawn at random" if self.told is None else f"of {self.told.path}"
        return f"on {self._samples:,} of {self._size:,} samples, {where}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples, "size": self._size}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples, self._size = state_dict["samples"], state_dict["size"]
