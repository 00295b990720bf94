"""Averages of the weights beside Lightning's, in the same fit, and the gradient noise scale beside plain training."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Encoder, Perceptron

PACKAGE = "lightning"


class Many(LightningModule):
    """Two tensors per layer, of which the step uses few: the rest of the step costs little."""

    def __init__(self, layers: int = 5000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers[0](batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers[0].parameters(), lr=1e-3)


class Adam(Perceptron):
    """A million weights, with Adam."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _many() -> tuple[Arm, Arm]:
    batch = torch.randn(2, 8)
    ours = fit_arm(Many(), batch, [eff.ExponentialMovingAverage(700)])
    return ours, fit_arm(Many(), batch, [EMAWeightAveraging(decay=0.999, use_buffers=False)])


def _ema() -> tuple[Arm, Arm]:
    batch = torch.randn(1, 512), torch.randint(512, (1,))
    ours = fit_arm(Adam(512, 26), batch, [eff.ExponentialMovingAverage(700)])
    return ours, fit_arm(Adam(512, 26), batch, [EMAWeightAveraging(decay=0.999)])


def _swa() -> tuple[Arm, Arm]:
    """Both keep a high learning rate; the weights join the mean only as an epoch ends."""
    batch = torch.randn(1, 512), torch.randint(512, (1,))
    ours = fit_arm(Adam(512, 26), batch, [eff.StochasticWeightAveraging(start=0.0, rate=1.0)])
    return ours, fit_arm(Adam(512, 26), batch, [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)])


def _noise() -> tuple[Arm, Arm]:
    """Beside the same fit without it."""
    batch = torch.randn(8, 64, 64), torch.randint(64, (8, 64))
    ours = fit_arm(Encoder(64, 2), batch, [eff.GradientNoiseScale()], batches=2)
    return ours, fit_arm(Encoder(64, 2), batch, batches=2)


def _bytes(ours: Callable[[], Callback], peer: Callable[[], Callback]) -> Callable[[], dict[str, float]]:
    """The size of a checkpoint with Adam's state per parameter, of both."""

    def of(make: Callable[[], Callback]) -> float:
        module, data = Adam(512, 4), [(torch.randn(1, 512), torch.randint(512, (1,)))] * 4
        options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "saved.ckpt")

            class Save(Callback):
                def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                    if trainer.current_epoch == 2:
                        trainer.save_checkpoint(path)

            trainer = Trainer(
                accelerator="cpu", max_epochs=3, callbacks=[make(), Save()], enable_checkpointing=False, **options
            )
            trainer.fit(module, DataLoader(data, batch_size=None))  # pyright: ignore[reportArgumentType]
            return path.stat().st_size / sum(p.numel() for p in module.parameters())

    return lambda: {
        "checkpoint bytes per parameter, ours": of(ours),
        "checkpoint bytes per parameter, peer": of(peer),
    }


def cases() -> list[Case]:
    """Averages by step and by checkpoint size, and the noise scale."""
    ema = _bytes(lambda: eff.ExponentialMovingAverage(700), lambda: EMAWeightAveraging(decay=0.999))
    swa = _bytes(
        lambda: eff.StochasticWeightAveraging(start=0.0, rate=1.0),
        lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1),
    )
    ours, theirs = "ExponentialMovingAverage", "lightning EMAWeightAveraging"
    return [
        Case("moving average, 10,000 tensors", ours, theirs, PACKAGE, _many, goal=1.0),
        Case("moving average, 26 MiB of weights", ours, theirs, PACKAGE, _ema, goal=1.0, figures=ema),
        Case(
            "mean of the weights at the ends of epochs",
            "StochasticWeightAveraging",
            "lightning StochasticWeightAveraging",
            PACKAGE,
            _swa,
            goal=1.0,
            figures=swa,
        ),
        Case("gradient noise scale", "GradientNoiseScale", "training without it", PACKAGE, _noise, goal=1.1),
    ]
