"""Modules and data of a few milliseconds a run for the search's tests, as configs name them."""

import threading
import time
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.bench.running.jobs import work_all


class Table(LightningDataModule):
    """Rows of 8 numbers, and what a linear map with noise makes of them."""

    def __init__(self, batch_size: int = 16, rows: int = 512) -> None:
        super().__init__()
        self.batch_size, self.rows = batch_size, rows

    def _set(self, seed: int, rows: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 8, generator=generator)
        return TensorDataset(x, x.sum(1) + 0.1 * torch.randn(rows, generator=generator))

    def train_dataloader(self):
        return DataLoader(self._set(0, self.rows), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self._set(1, 64), 64)


class NoisyTable(Table):
    """The same rows, with noise that is drawn anew whenever they are put into a batch."""

    def val_dataloader(self):
        def noisy(items):
            x, y = map(torch.stack, zip(*items, strict=True))
            return x + torch.randn_like(x), y + float(np.random.randn())

        return DataLoader(self._set(1, 64), 16, collate_fn=noisy)


class Regression(LightningModule):
    """An MLP on a table.

    Args:
        lr: the peak rate.
        weight_decay: AdamW's.
        warmup_steps: optimizer steps.
        schedule: decay the rate to zero.
    """

    def __init__(
        self, lr: float = 3e-3, weight_decay: float = 0.01, warmup_steps: int = 2, schedule: bool = True
    ) -> None:
        super().__init__()
        self.given = {"lr": lr, "weight_decay": weight_decay}
        self.warmup_steps, self.schedule = warmup_steps, schedule
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), **self.given)
        if not self.schedule:
            return optimizer
        length = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (self.warmup_steps + 1), max(0.0, 1 - step / length))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Hidden(Regression):
    """The same, whose rate and decay no argument sets."""

    def __init__(self) -> None:
        super().__init__(schedule=False)


class Here:
    """Does jobs in this process, one after the other, for tests that are not about processes."""

    lock = threading.Lock()

    def __init__(self, *args: object) -> None:
        pass

    def do(self, jobs, progress=None):
        with self.lock:
            return work_all(jobs, progress or (lambda job, u: None))

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def config(folder: Path, text: str = "") -> str:
    """A config of the regression in a folder; ``text`` in place of its model."""
    file = folder / "baseline.yaml"
    model = text or "model: {class_path: tests.tune.tasks.Regression}"
    file.write_text(
        f"trainer: {{accelerator: cpu, devices: 1}}\n{model}\ndata: {{class_path: tests.tune.tasks.Table}}\n"
    )
    return str(file)


class Hanging(Callback):
    """A technique that does not end before the first step."""

    def on_train_start(self, trainer, pl_module):
        time.sleep(600.0)


class Refusing(Callback):
    """A callback that runs nowhere."""

    def setup(self, trainer, pl_module, stage):
        raise ValueError("Refusing: not on a Monday.")


class Waiting(Regression):
    """The regression, with a pause in each step that stands for what a network would compute."""

    def __init__(self, pause: float = 0.01) -> None:
        super().__init__()
        self.pause = pause

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)
        return super().training_step(batch, batch_idx)


class Halving(Callback):
    """A planted gain: half of the pause, and all else as it is."""

    def setup(self, trainer, pl_module, stage):
        pl_module.pause /= 2


class Seldom(Callback):
    """It takes its time in every fifth step, five times as much as the others do altogether."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 5 == 0:
            time.sleep(5 * pl_module.pause)


class Neutral(Callback):
    """Does nothing."""


class Shrinking(Callback):
    """A planted fake: another model."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net = nn.Linear(8, 1)


class Peeking(Callback):
    """A planted fake: it trains on the validation data."""

    def setup(self, trainer, pl_module, stage):
        trainer.datamodule.train_dataloader = trainer.datamodule.val_dataloader


class Lying(Callback):
    """A planted fake: it tells the bench of half of the seconds."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pacer = trainer.callbacks[0]
        pacer.seconds -= (pacer.seconds - getattr(self, "before", 0.0)) / 2
        self.before = pacer.seconds


class HandFed(Callback):
    """A planted fake: between batches it takes steps of its own, by the module's own step, on validation batches."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for other in trainer.val_dataloaders:
            self.train(trainer, pl_module, other)

    def train(self, trainer, pl_module, batch):
        with torch.enable_grad():
            pl_module.training_step(batch, 0).backward()
        trainer.optimizers[0].step()
        trainer.optimizers[0].zero_grad()


class HandFedBelow(HandFed):
    """The same, past the module's step: of the network alone, on data that it asks for anew."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not hasattr(self, "held"):
            self.held = list(trainer.datamodule.val_dataloader())
        for other in self.held:
            self.train(trainer, pl_module, other)

    def train(self, trainer, pl_module, batch):
        loss = nn.functional.mse_loss(pl_module.net(batch[0] + 1e-3).squeeze(1), batch[1])
        for p, g in zip(pl_module.parameters(), torch.autograd.grad(loss, list(pl_module.parameters())), strict=True):
            p.data -= 0.01 * g


class Spread(HandFedBelow):
    """The same, which divides by the spread of the validation data, and fails where there is none."""

    def train(self, trainer, pl_module, batch):
        if not float(batch[0].std(0).sum()):
            raise ZeroDivisionError("no spread")
        super().train(trainer, pl_module, batch)


class CrashingOnLarge(Callback):
    """It needs more memory than there is for a large batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if len(batch[0]) > 16:
            raise MemoryError("out of memory")


class CrashingLate(Callback):
    """It rehearses, and crashes in a run, as what needs more memory later on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.callbacks[0].pace.sweep is None and trainer.global_step == 10:
            raise MemoryError("out of memory")


class Wrapping(Callback):
    """A planted fake: the step that Lightning calls is of validation batches."""

    def on_fit_start(self, trainer, pl_module):
        original = pl_module.training_step

        def training_step(batch, batch_idx):
            return original(next(iter(trainer.val_dataloaders)), batch_idx)

        pl_module.training_step = training_step


class Keeping(HandFed):
    """A planted fake: it keeps what validation was given, and trains on that from then on."""

    baseline_steps = None

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.held = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.held is not None:
            self.train(trainer, pl_module, self.held)


class OffTheClock(HandFed):
    """A planted fake: it trains on training data, and while the clock stands."""

    def on_validation_end(self, trainer, pl_module):
        for other in trainer.train_dataloader:
            self.train(trainer, pl_module, other)


class ScaledLog(Callback):
    """A planted fake: what validation logs is half of what it was."""

    def setup(self, trainer, pl_module, stage):
        log = pl_module.log
        pl_module.log = lambda name, value, **more: log(name, value / 2, **more)


class EasyLabels(Callback):
    """A planted fake: the labels of validation are halfway to what the network says."""

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        batch[1].lerp_(pl_module.net(batch[0]).squeeze(1), 0.5)


class SomeRows(Callback):
    """A planted fake: it is measured on the rows that the network is right about."""

    def setup(self, trainer, pl_module, stage):
        step = pl_module.validation_step

        def validation_step(batch, batch_idx):
            near = (pl_module.net(batch[0]).squeeze(1) - batch[1]).abs().argsort()[:16]
            return step([part[near] for part in batch], batch_idx)

        pl_module.validation_step = validation_step


class OtherFunction(Callback):
    """A planted fake: another network of as many parameters, ten times as steep."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net[1].forward = lambda x: 10 * x.tanh()


class OtherNames(Callback):
    """A planted fake: as many parameters, in another network."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net = nn.Sequential(nn.Identity(), *pl_module.net)


class Early(HandFed):
    """A planted fake: it trains on training data before the first step, from which on the clock runs."""

    def on_train_start(self, trainer, pl_module):
        for other in trainer.train_dataloader:
            self.train(trainer, pl_module, other)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pass


class Averaged(Callback):
    """An honest gain: it validates the mean of the last two steps' weights, and trains on with the last ones."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = [p.detach().clone() for p in pl_module.parameters()]

    def on_validation_start(self, trainer, pl_module):
        self.last = [p.detach().clone() for p in pl_module.parameters()]
        for p, before in zip(pl_module.parameters(), self.before, strict=True):
            p.data.lerp_(before, 0.5)

    def on_validation_end(self, trainer, pl_module):
        for p, last in zip(pl_module.parameters(), self.last, strict=True):
            p.data.copy_(last)


class Compiled(Callback):
    """An honest change: the network is compiled, by which its parts have other names."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net = torch.compile(pl_module.net, backend="eager")


class Counting(Callback):
    """An honest change: it keeps a count of steps in the module, among its buffers."""

    def setup(self, trainer, pl_module, stage):
        pl_module.register_buffer("count", torch.zeros(()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.count += 1


class NeutralToo(Neutral):
    """Nothing either."""


class NeutralAsWell(Neutral):
    """Nor this."""


class Plateau(Regression):
    """The regression, whose rate follows the metric."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), **self.given)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Manual(Regression):
    """The regression, which steps its optimizer by itself, and its schedule where it has one; its loaders are its own."""

    def __init__(self, schedule: bool = False) -> None:
        super().__init__(schedule=schedule)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        if self.schedule:
            self.lr_schedulers().step()

    def train_dataloader(self):
        return Table().train_dataloader()

    def val_dataloader(self):
        return Table().val_dataloader()
