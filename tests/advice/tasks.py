"""Tiny modules whose steps cost planted seconds of a clock of their own, so that no test depends on the machine."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_eff.advice import looking
from lightning_eff.advice._running import measuring, stopwatch


class Clock:
    """A clock that stands still unless a planted cost moves it."""

    seconds = 0.0

    def spend(self, seconds: float) -> None:
        self.seconds += seconds


CLOCK = Clock()


@contextmanager
def planted_clock() -> Iterator[None]:
    """Measure by planted costs alone, and look at few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch, "now", lambda: CLOCK.seconds)
        patch.setattr(stopwatch, "queued_seconds", lambda: 0.0)
        patch.setattr(measuring, "TURN_SECONDS", 1e-9)
        patch.setattr(looking, "SECONDS", 0.0)
        yield


class Rows(Dataset[Any]):
    """Samples of 8 features and a target, each of which costs ``seconds`` of the planted clock in the process that makes it.

    Args:
        seconds: of the planted clock.
        real: of sleep, which the profile sees.
    """

    def __init__(self, seconds: float = 0.0, real: float = 0.0, size: int = 64) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
        self.seconds, self.real = seconds, real

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        CLOCK.spend(self.seconds)
        if self.real:
            time.sleep(self.real)
        return self.x[index], self.x[index].sum()


class Plain(pl.LightningModule):
    """An MLP whose step costs ``cost`` planted seconds."""

    def __init__(self, cost: float = 1.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.cost = cost

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CLOCK.spend(self.cost)
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0])[:, 0], batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Table(pl.LightningDataModule):
    """Rows in batches of 4."""

    def __init__(self, seconds: float = 0.0, real: float = 0.0, size: int = 64) -> None:
        super().__init__()
        self.rows = Rows(seconds, real, size)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(size=8), 4)


class HandWritten(pl.LightningModule):
    """Causal attention as many write it. Weights that are really computed cost three planted seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.embed(batch)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(8)
        hidden = torch.ones(batch.shape[1], batch.shape[1], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        CLOCK.spend(4.0 if type(weights) is Tensor else 1.0)
        logits = self.head((weights @ v).transpose(1, 2).flatten(2))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def token_loader() -> Any:
    return DataLoader(torch.randint(20, (64, 12), generator=torch.Generator().manual_seed(0)), 4)  # pyright: ignore[reportArgumentType]


class Cheaper(Callback):
    """Multiplies a step's planted cost.

    Args:
        factor: of the cost.
        with_other: the factor instead, where another Cheaper is there, too.
        shift: is added to the gradients.
    """

    def __init__(self, factor: float, with_other: float | None = None, shift: float = 0.0) -> None:
        self.factor, self.with_other, self.shift = factor, with_other, shift

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        others = sum(isinstance(one, Cheaper) for one in trainer.callbacks) > 1
        pl_module.cost *= self.with_other if others and self.with_other is not None else self.factor

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for p in pl_module.parameters():
            p.grad += self.shift


class Compiles(Cheaper):
    """A Cheaper whose first step costs ``start`` planted seconds more."""

    def __init__(self, factor: float, start: float) -> None:
        super().__init__(factor)
        self.start = start

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            CLOCK.spend(self.start)


class Breaks(Callback):
    """Raises in the first step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        raise RuntimeError("planted failure")
