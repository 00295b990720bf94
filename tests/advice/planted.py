"""A small module without problems, from which each test plants one, and how it is watched."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_eff.advice.problems import Problem, Problems

STEPS = 12


class Rows(Dataset[Any]):
    """Samples of 8 features with one of 3 labels."""

    def __init__(self, size: int = 64, change: Callable[[Any], Any] = lambda sample: sample) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)
        self.change = change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.change((self.x[index], self.y[index]))


class Well(pl.LightningModule):
    """A classifier whose learning rate decays to zero. Tests override its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def trained(self) -> Any:
        return self.parameters()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained(), lr=1e-3)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


class Experts(Well):
    """One expert of four per step, and some are never drawn in a short run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts[self.global_step % 3](self.encoder(x)))


class Gan(pl.LightningModule):
    """Two networks that are trained in turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        fake = self.generator(torch.randn(len(real), 4, device=self.device))
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(F.softplus(-self.critic(fake)).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        loss = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(real)).mean()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.log("critic", loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), 2e-4),
            torch.optim.Adam(self.critic.parameters(), 2e-4),
        )


def rows(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Rows(**kwargs), batch_size=8)


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, train: Any = None, val: Any = None, **kwargs: Any
) -> pl.Trainer:
    """Train some steps on a CPU, and leave nothing behind."""
    arguments = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **kwargs,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **arguments)
    if isinstance(train, pl.LightningDataModule):
        trainer.fit(module, train)
    else:
        trainer.fit(module, rows() if train is None else train, rows(size=32) if val is None else val)
    return trainer


def watch(module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> dict[str, Problem]:
    """The problems of a run, by name."""
    given = {name: kwargs.pop(name) for name in list(kwargs) if name in inspect.signature(Problems).parameters}
    problems = Problems(**given)
    fit(module, *callbacks, problems, **kwargs)
    found = problems.problems()
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}
