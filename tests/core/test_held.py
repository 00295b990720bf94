"""Samplers that keep their own generators, orders and counters go on from them after a resume."""

import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Sampler

from lightning_eff import ExactResume
from lightning_eff._core._loaders.sampler_state import Held
from tests.models import trainer


class Orders(Sampler):
    """Shuffles in place by a generator that it holds, as chemprop's SeededSampler does."""

    def __init__(self, kind: str) -> None:
        self.order = list(range(10)) if kind in ("python", "counter") else np.arange(10)
        self.epochs_seen = 0
        self.kind = kind
        self.draws = {
            "generator": lambda: np.random.default_rng(3),
            "philox": lambda: np.random.Generator(np.random.Philox(3)),
            "legacy": lambda: np.random.RandomState(3),
            "python": lambda: random.Random(3),
            "torch": lambda: torch.Generator().manual_seed(3),
            "counter": lambda: None,
        }[kind]()

    def __len__(self) -> int:
        return 10

    def __iter__(self):
        self.epochs_seen += 1
        if self.kind == "counter":
            self.order = list(np.random.default_rng(self.epochs_seen).permutation(10))
        elif self.kind == "torch":
            self.order = self.order[torch.randperm(10, generator=self.draws).numpy()]
        else:
            self.draws.shuffle(self.order)
        return iter([int(i) for i in self.order])


class Seen(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch.flatten().int().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("saved", [3, 5, 8, 10])  # in the first epoch, at its end, in the second, at its end
@pytest.mark.parametrize("kind", ["generator", "philox", "legacy", "python", "torch", "counter"])
def test_a_samplers_own_state_goes_on_after_a_resume(kind: str, saved: int, tmp_path: Path) -> None:
    def run(path: Path | None = None) -> list[list[int]]:
        module = Seen()
        loader = DataLoader(torch.arange(10.0)[:, None], batch_size=2, sampler=Orders(kind))
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=saved, save_top_k=-1)
        made = trainer(ExactResume(), saving, max_steps=15, max_epochs=-1, enable_checkpointing=True)
        made.fit(module, loader, ckpt_path=path, weights_only=True)
        return module.batches

    plain, order = [], Orders(kind)
    for _ in range(3):
        indices = list(order)
        plain += [indices[i : i + 2] for i in range(0, 10, 2)]
    whole = run()
    assert whole == plain
    assert plain[:5] != plain[5:10] != plain[10:]
    assert run(tmp_path / f"step={saved}.ckpt") == whole[saved:]


def test_what_does_not_change_is_not_saved() -> None:
    class Owner:
        pass

    owner = Owner()
    owner.weights = torch.ones(1000)
    owner.order = np.arange(4)
    owner.data = object()
    held = Held([owner])
    assert held.saved() == [{}]
    owner.order[0] = 7
    [saved] = held.saved()
    assert list(saved) == ["order"] and saved["order"]["array"].tolist() == [7, 1, 2, 3]
