"""Mixtures and random operations beside a plain implementation in ``training_step``, in a network of a few milliseconds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Convolutions

BATCH, SIDE, CLASSES = 32, 32, 10
NET = {"width": 16, "depth": 2}
Mixed = Callable[[Tensor, np.random.Generator], tuple[Tensor, Tensor, float]]


def mixup(x: Tensor, draws: np.random.Generator) -> tuple[Tensor, Tensor, float]:
    """Return the mixtures, the partners and the share of their own labels, as scripts do it."""
    share, partner = float(draws.beta(1.0, 1.0)), torch.randperm(len(x))
    return share * x + (1 - share) * x[partner], partner, share


def cut_mix(x: Tensor, draws: np.random.Generator) -> tuple[Tensor, Tensor, float]:
    """The same for a box of another image."""
    share, partner = float(draws.beta(1.0, 1.0)), torch.randperm(len(x))
    height, width = x.shape[2:]
    half = [int(size * (1 - share) ** 0.5) // 2 for size in (height, width)]
    row, column = int(draws.integers(height)), int(draws.integers(width))
    rows = slice(max(0, row - half[0]), row + half[0])
    columns = slice(max(0, column - half[1]), column + half[1])
    x = x.clone()
    x[:, :, rows, columns] = x[partner][:, :, rows, columns]
    area = len(range(*rows.indices(height))) * len(range(*columns.indices(width)))
    return x, partner, 1 - area / (height * width)


class Mixes(Convolutions):
    """Mixes in its own step, and adds the losses on both labels."""

    def __init__(self, mix: Mixed) -> None:
        super().__init__(**NET)
        self.mix, self.draws = mix, np.random.default_rng(0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, partner, share = self.mix(batch[0], self.draws)
        y, output = batch[1], self(x)
        return share * F.cross_entropy(output, y) + (1 - share) * F.cross_entropy(output, y[partner])


class Augments(Convolutions):
    """Changes the images in its own step."""

    def __init__(self, change: nn.Module) -> None:
        super().__init__(**NET)
        self.change = change

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(self.change(batch[0])), batch[1])


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))


def _mixing(technique: Callable[[], Any], mix: Mixed) -> Callable[[], tuple[Arm, Arm]]:
    return lambda: (fit_arm(Convolutions(**NET), _batch(), [technique()]), fit_arm(Mixes(mix), _batch()))


def _rand_augment() -> tuple[Arm, Arm]:
    from kornia.augmentation.auto import RandAugment

    peer = Augments(RandAugment(n=2, m=9))
    return fit_arm(Convolutions(**NET), _batch(), [eff.RandAugment(2, magnitude=9)]), fit_arm(peer, _batch())


def cases() -> list[Case]:
    return [
        Case(
            "Mixup, 32 images, one share per batch",
            "Mixup",
            "the same in training_step",
            "torch",
            _mixing(lambda: eff.Mixup(alpha=1.0, per_sample=False), mixup),
            goal=1.05,
        ),
        Case(
            "CutMix, 32 images, one box per batch",
            "CutMix",
            "the same in training_step",
            "torch",
            _mixing(lambda: eff.CutMix(), cut_mix),
            goal=1.05,
        ),
        Case(
            "RandAugment, 32 images with operations of their own",
            "RandAugment",
            "kornia RandAugment, two operations per batch",
            "kornia",
            _rand_augment,
        ),
    ]
