"""A task of a few milliseconds a run for the bench's tests, and functions that build its arms."""

import os
import signal
import time
from collections.abc import Callable

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.bench.arms import Built


def dataset(size: int = 64, seed: int = 0, shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator) + shift
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())


class Small(LightningModule):
    """A two-layer classifier, whose rate decays linearly to zero over ``trainer.estimated_stepping_batches``."""

    def __init__(self, *, warm_up: int = 2, length: int | None = None, interval: str = "step", lr: float = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.warm_up, self.length, self.interval, self.lr = warm_up, length, interval, lr
        self.seen: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(float(x.sum()))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        self.log_dict({"val_loss": loss, "val_acc": ((logits > 0) == (y > 0)).float().mean()})

    def factor(self, step: int, length: float) -> float:
        return min((step + 1) / (self.warm_up + 1), max(0.0, 1 - step / length))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        length = self.length or self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, length))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Constant(Small):
    """The same without a schedule."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Delay(Callback):
    """Sleeps before each batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *args: object) -> None:
        time.sleep(self.seconds)


class Fail(Callback):
    """Raises at a batch of the run, counted from 1."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.count = at, error, 0

    def on_train_batch_start(self, *args: object) -> None:
        self.count += 1
        if self.count == self.at:
            raise self.error


def arm(
    module: Callable[[], LightningModule] = Small,
    callbacks: Callable[[], list[Callback]] = list,
    *,
    train: Callable[[], TensorDataset] = dataset,
    val: Callable[[], TensorDataset] = lambda: dataset(32, 1),
    batch_size: int = 8,
    **trainer: object,
) -> Callable[[], tuple]:
    """A function as ``Benchmark`` takes it."""

    def build():
        made = Trainer(accelerator="cpu", devices=1, max_epochs=3, callbacks=callbacks(), logger=False, **trainer)
        loaders = {
            "train_dataloaders": DataLoader(train(), batch_size, shuffle=True),
            "val_dataloaders": DataLoader(val(), 16),
        }
        return made, module(), loaders

    return build


def built(function: Callable[[], tuple]) -> Built:
    trainer, module, data = function()
    return Built(trainer, module, data)


class Data(LightningDataModule):
    """The data set for configs."""

    def train_dataloader(self):
        return DataLoader(dataset(), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(dataset(32, 1), 16)


class Die(Callback):
    """Kills its process at a batch of the run, counted from 1."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def on_train_batch_start(self, *args: object) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
