"""Data sets, transforms and collate functions that keep a random generator of their own draw on from it after a resume."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from lightning_eff import ExactResume, SampleSubset
from tests.models import trainer

DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: functools.partial(_torch, torch.Generator().manual_seed(3)),
    "numpy": lambda: np.random.default_rng(3).random,
    "legacy": lambda: functools.partial(_legacy, np.random.RandomState(3)),
    "python": lambda: functools.partial(random.Random.random, random.Random(3)),
}


def _torch(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _legacy(state: np.random.RandomState) -> float:
    return state.random_sample()


class Noise:
    def __init__(self, kind: str) -> None:
        if kind == "numpy":
            self.generator = np.random.default_rng(3)
            self.draw = lambda: float(self.generator.random())
        else:
            self.draw = DRAWS[kind]()

    def __call__(self, x: float) -> float:
        return x + 0.5 * float(self.draw())


class Noisy(Dataset):
    def __init__(self, kind: str) -> None:
        self.transforms = [{"noise": Noise(kind)}]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return self.transforms[0]["noise"](float(index))


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.noise = Noise("torch")

    def __iter__(self):
        return (self.noise(float(i)) for i in range(10))


class WithoutLength(Sampler):
    def __init__(self) -> None:
        pass

    def __iter__(self):
        return iter(torch.randperm(10).tolist())


class Collating:
    def __init__(self) -> None:
        self.noise = Noise("python")

    def collate(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor([self.noise(float(v)) for v in values])


class Seen(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches: list[list[float]] = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch.flatten().tolist())
        return self.layer(batch.float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    **{
        kind: functools.partial(lambda kind: DataLoader(Subset(Noisy(kind), range(10)), 2, shuffle=True), kind)
        for kind in DRAWS
    },
    "a stream": lambda: DataLoader(Stream(), 2),
    "a sampler without a length": lambda: DataLoader(Noisy("torch"), 2, sampler=WithoutLength()),
    "a collate function": lambda: DataLoader(torch.arange(10), 2, shuffle=True, collate_fn=Collating().collate),
    "workers": lambda: DataLoader(Subset(Noisy("torch"), range(10)), 2, shuffle=True, num_workers=2),
}


def run(
    name: str, folder: Path, path: Path | None = None, technique: Callable[[], pl.Callback] = ExactResume
) -> list[list[float]]:
    pl.seed_everything(1, verbose=False)
    module = Seen()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [technique()] if path else [technique(), saving]
    made = trainer(*callbacks, max_steps=12, max_epochs=-1, enable_checkpointing=path is None)
    made.fit(module, LOADERS[name](), ckpt_path=path, weights_only=True)
    return module.batches


@pytest.mark.parametrize("name", LOADERS)
def test_the_datas_own_generators_go_on_after_a_resume(name: str, tmp_path: Path) -> None:
    whole = run(name, tmp_path)
    assert len(whole) == 12
    saved = (3, 8) if name == "workers" else (3, 5, 8, 10)  # in the first epoch, at its end, in the second, at its end
    for step in saved:
        assert run(name, tmp_path, tmp_path / f"step={step}.ckpt") == whole[step:], step


def test_they_go_on_where_a_technique_chooses_the_samples(tmp_path: Path) -> None:
    whole = run("torch", tmp_path, technique=lambda: SampleSubset(0.6))
    for step in (2, 3, 5):
        found = run("torch", tmp_path, tmp_path / f"step={step}.ckpt", lambda: SampleSubset(0.6))
        assert found == whole[step:], step
