"""Samplers of lists with ``batch_size=None``: the dataset fetches whole batches, and samples are chosen all the same."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_eff import (
    SAF,
    AutoAssist,
    DataPruning,
    DifficultyPacing,
    LossBiasedSampling,
    RHOLoss,
    RobustImportanceSampling,
    SampleSubset,
)
from tests.models import trainer


class Columns(Dataset[dict[str, Tensor]]):
    """Takes one index, or a batch of them in any form."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(20, 8, generator=draw), torch.randint(0, 3, (20,), generator=draw)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        at = torch.as_tensor(index)
        return {"x": self.x[at], "y": self.y[at]}


class As(BatchSampler):
    """A batch sampler that yields its indices in another form."""

    def __init__(self, form: Callable[[list[int]], Any]) -> None:
        super().__init__(RandomSampler(Columns()), 4, drop_last=False)
        self.form = form

    def __iter__(self) -> Any:
        return map(self.form, super().__iter__())


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.f = torch.nn.Linear(8, 3)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch["x"].clone())
        return torch.nn.functional.cross_entropy(self.f(batch["x"]), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_batches() -> DataLoader[Any]:
    return DataLoader(Columns(), 4, shuffle=True)


def in_lists() -> DataLoader[Any]:
    return DataLoader(Columns(), sampler=BatchSampler(RandomSampler(Columns()), 4, drop_last=False), batch_size=None)


def fit(loader: Any, technique: Any) -> Net:
    pl.seed_everything(3, verbose=False)
    net = Net()
    trainer(technique, max_epochs=3).fit(net, loader)
    return net


TECHNIQUES: dict[str, Callable[[], Any]] = {
    "SampleSubset": lambda: SampleSubset(0.6),
    "DifficultyPacing": lambda: DifficultyPacing("loss", c0=0.5),
    "DataPruning": lambda: DataPruning("el2n", keep=0.5, epochs=1),
    "RobustImportanceSampling": RobustImportanceSampling,
    "AutoAssist": AutoAssist,
    "LossBiasedSampling": LossBiasedSampling,
    "RHOLoss": lambda: RHOLoss(model=Net(), keep=0.5, epochs=1),
    "SAF": lambda: SAF(lag=1),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_lists_train_as_batches_of_the_same_size_do(name: str) -> None:
    def trained(loader: DataLoader[Any]) -> Net:
        pl.seed_everything(1, verbose=False)  # a reference model begins with the same weights
        return fit(loader, TECHNIQUES[name]())

    expected, found = trained(in_batches()), trained(in_lists())
    assert len(expected.seen) == len(found.seen) > 0
    assert all(map(torch.equal, expected.seen, found.seen))
    assert torch.equal(expected.f.weight, found.f.weight)


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor], ids=["tuple", "array", "tensor"])
def test_indices_keep_the_form_in_which_the_sampler_yields_them(form: Callable[[list[int]], Any]) -> None:
    forms: set[type] = set()

    class Looks(Columns):
        def __getitem__(self, index: Any) -> dict[str, Tensor]:
            forms.add(type(index))
            return super().__getitem__(index)

    found = fit(DataLoader(Looks(), sampler=As(form), batch_size=None), SampleSubset(0.6))
    assert forms == {type(form([0]))}
    assert all(map(torch.equal, fit(in_batches(), SampleSubset(0.6)).seen, found.seen))
