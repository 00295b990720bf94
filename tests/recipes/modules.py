"""Modules that the recipes are for, each with its data."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests import models


class TinyResNet(pl.LightningModule):
    """Three convolutions on (images, label) tuples: (B, 1, 32, 32) and (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2))
        )
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = F.relu(self.stem(batch[0]))
        for block in self.blocks:
            x = F.relu(x + block(x))
        loss = F.cross_entropy(self.head(x.mean((2, 3))), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LargeVocabulary(models.TinyGPT):
    """A ``TinyGPT`` with 20,000 entries, of which the data use the first ones."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.embed, self.head = nn.Embedding(20_000, self.dim), nn.Linear(self.dim, 20_000, bias=False)


def images() -> DataLoader[Any]:
    """Images of 32 pixels, whose brightest third is the label."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 1, 32, 32, generator=generator), torch.randint(3, (20,), generator=generator)
    for image, label in zip(x, y, strict=True):
        image[0, 10 * int(label) : 10 * int(label) + 10] += 2
    return DataLoader(TensorDataset(x, y), 4)


def masked(length: int = 64) -> DataLoader[Any]:
    """Texts for a masked language model of ``models``: 20 % of the tokens are masked, by the token 60."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 60, (20, length), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.2
    labels = torch.where(hidden, ids, -100)
    samples = [{"input_ids": i, "labels": j} for i, j in zip(torch.where(hidden, 60, ids), labels, strict=True)]
    return DataLoader(samples, 4)  # pyright: ignore[reportArgumentType]


def make(name: str) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """A module and its data, by name: "cnn", "masked", "large", or a name of ``tests.models``."""
    pl.seed_everything(1, verbose=False)
    if name == "cnn":
        return TinyResNet(), images()
    if name == "masked":
        module = models.hugging_face("bert")
        return module, masked(models.LENGTH)
    if name == "large":
        return LargeVocabulary(), models.loader("tiny_gpt", shuffle=False)
    return models.module(name), models.loader(name, shuffle=False)
