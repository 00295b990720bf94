"""Augmentations of images, each in a fit: ours as a callback, the peer in ``training_step``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Trained

BATCH, SIDE, CLASSES = 64, 32, 10


class Light(Trained):
    """A network that costs little, so that the augmentation shows.

    Args:
        change: of the images, before the network.
    """

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.head = nn.Conv2d(3, CLASSES, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mean((2, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images = batch[0] if self.change is None else self.change(batch[0])
        return F.cross_entropy(self(images), batch[1])


def _fits(
    technique: Callable[[], Any], change: Callable[[], Callable[[Tensor], Tensor]]
) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        batch = torch.rand(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))
        return fit_arm(Light(), batch, [technique()]), fit_arm(Light(change()), batch)

    return build


def _erasing() -> Any:
    import kornia.augmentation as K

    return K.RandomErasing(scale=(0.02, 0.4), ratio=(0.3, 3.3), p=0.5)


def _square() -> Any:
    import kornia.augmentation as K

    return K.RandomErasing(scale=(0.25, 0.25), ratio=(1.0, 1.0), p=1.0)


def _auto() -> Any:
    from kornia.augmentation.auto import AutoAugment

    return AutoAugment("cifar10")


def _resized() -> Any:
    return lambda images: F.interpolate(images, scale_factor=0.5, mode="bilinear", antialias=True)


def cases() -> list[Case]:
    return [
        Case(
            "random erasing, 64 images",
            "RandomErasing",
            "kornia.augmentation.RandomErasing",
            "kornia",
            _fits(lambda: eff.RandomErasing(0.5, fill="zero"), _erasing),
        ),
        Case(
            "Cutout, 64 images",
            "Cutout",
            "kornia.augmentation.RandomErasing, squares",
            "kornia",
            _fits(lambda: eff.Cutout(0.5), _square),
        ),
        Case(
            "AutoAugment for CIFAR-10, 64 images",
            "AutoAugment",
            "kornia AutoAugment, one policy per batch",
            "kornia",
            _fits(lambda: eff.AutoAugment("cifar10"), _auto),
        ),
        Case(
            "images at half their size",
            "ProgressiveResizing",
            "torch F.interpolate",
            "torch",
            _fits(lambda: eff.ProgressiveResizing(0.5), _resized),
        ),
    ]
