"""Techniques beside Lightning's own callbacks and torch's schedulers, in the same fit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ThroughputMonitor
from torch.nn.utils import prune

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import STEPS, fit_arm
from benchmarks.peers.modules import Convolutions, Encoder

PACKAGE = "lightning"
Callbacks = Callable[[], Sequence[Callback]]


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 64, 128), torch.randint(64, (4, 64))


class Scheduled(Encoder):
    """With a scheduler of torch per step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _schedule() -> tuple[Arm, Arm]:
    batch = _tokens()
    return fit_arm(Encoder(), batch, [eff.LearningRateSchedule("linear")]), fit_arm(Scheduled(), batch)


def _fits(ours: Callbacks, peer: Callbacks, batches: int = 1) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        batch = _tokens()
        return (
            fit_arm(Encoder(), batch, ours(), batches=batches),
            fit_arm(Encoder(), batch, peer(), batches=batches),
        )

    return build


def _masked() -> tuple[Arm, Arm]:
    """ModelPruning masks at the end of an epoch, by these functions of torch. From then on each step applies the masks."""
    batch, peer = _tokens(), Encoder()
    for layer in peer.blocks.modules():
        if isinstance(layer, torch.nn.Linear):
            prune.l1_unstructured(layer, "weight", amount=0.5)
    return fit_arm(Encoder(), batch, [eff.SNIP(0.5)]), fit_arm(peer, batch)


def _monitor() -> ThroughputMonitor:
    return ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), length_fn=lambda batch: batch[0].shape[1])


def _last() -> tuple[Arm, Arm]:
    """The channels-last layout, which is one call without us."""
    batch = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    peer: Any = Convolutions().to(memory_format=torch.channels_last)
    images = batch[0].contiguous(memory_format=torch.channels_last)
    return fit_arm(Convolutions(), batch, [eff.ChannelsLast()]), fit_arm(peer, (images, batch[1]))


def cases() -> list[Case]:
    return [
        Case(
            "linear decay of the learning rate", "LearningRateSchedule", "torch LambdaLR", "torch", _schedule, goal=1.1
        ),
        Case(
            "monitor of throughput",
            "EfficiencyMonitor",
            "lightning ThroughputMonitor",
            PACKAGE,
            _fits(lambda: [eff.EfficiencyMonitor()], lambda: [_monitor()]),
            goal=1.1,
        ),
        Case(
            "accumulation over four batches",
            "BatchSizeWarmup",
            "lightning GradientAccumulationScheduler",
            PACKAGE,
            _fits(
                lambda: [eff.BatchSizeWarmup(4, until=1.0, full=8)],
                lambda: [GradientAccumulationScheduler({0: 4})],
                batches=4,
            ),
            unit="four batches",
            goal=1.1,
        ),
        Case("masked weights", "SNIP", "torch prune, which lightning ModelPruning calls", "torch", _masked, goal=1.0),
        Case("channels last", "ChannelsLast", "torch Module.to(memory_format=...)", "torch", _last, goal=1.1),
    ]
