"""Rings of 64 x 64 pixels with a hatched mark to find among grey ones: drawn here, so that every machine has them.

Each image has a ring with marks in three of eight directions: one is hatched, by stripes of three pixels' period across and
down, and two are of the hatching's mean grey. The label is the direction of the hatched one. It is a fair task for what trains
on smaller images or on fewer patches:

- Resolution matters: at half the side a period is one pixel and a half, which no image can hold. Who knew where all marks are
  could tell the hatched one by 5.7 deviations of the noise at 64 pixels, by 2.4 (4.2 for a crop of the spectrum) at 48, and by
  0.7 at 32, through the marks' edges: near ln 3 = 1.10 nats. From two thirds of the side on there is room for the stripes.
- What is coarse helps none the less: that there is a ring, where it lies, which three directions are in question; from
  ln 8 = 2.08 nats to 1.10. So small images can teach a first half, and it is open whether that pays.
- No shortcut: marks are alike in size and mean, directions are drawn evenly, and rings move and differ in size.
- All eight directions lie on patches that random subsets may lack: who drops patches can miss the very one that tells.
"""

import math

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

SIDE = 64  # pixels
DIRECTIONS = 8
MARK = 6  # pixels, along the ring and across it
PERIOD = 3  # pixels, of the stripes
_DRAWN = 256  # rings that are drawn at once: memory stays small


def draw_rings(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 64, 64) in [-1, 1], rings on a background of -1, and labels (count,), the directions of the hatching.

    Radii are 18 to 24 pixels, strokes 4 wide, marks 6 by 6; centres lie up to 3 pixels from the middle.
    """
    parts = [_drawn(min(_DRAWN, count - first), generator) for first in range(0, count, _DRAWN)]
    images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return images, labels


def _drawn(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.rand(count, DIRECTIONS, generator=generator).argsort(dim=1)[:, :3]
    centre = SIDE / 2 - 0.5 + 6 * torch.rand(count, 2, generator=generator) - 3
    radius = 18 + 6 * torch.rand(count, generator=generator)
    return render(order, centre, radius), order[:, 0].contiguous()


def render(directions: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Rings (count, 1, 64, 64) in [-1, 1].

    Args:
        directions: (count, 3), in eighths of a turn from the right by way of below: the hatched mark's, and two grey ones'.
        centre: (count, 2), rows down and columns across, in pixels.
        radius: (count,), of the middle of the stroke, in pixels.
    """
    at = torch.arange(SIDE, dtype=torch.float32)
    down, across = at[:, None] - centre[:, 0, None, None], at[None, :] - centre[:, 1, None, None]  # (count, 64, 64)
    distance, middle = (down**2 + across**2).sqrt(), radius[:, None, None]
    ring, band = _inside(2.0 - (distance - middle).abs()), _inside(MARK / 2 - (distance - middle).abs())
    stripes = 0.5 + 0.5 * torch.cos((at[:, None] + at) * (2 * math.pi / PERIOD))  # (64, 64), 0.5 on average
    for k in range(directions.shape[1]):
        angle = directions[:, k, None, None] * (2 * math.pi / DIRECTIONS)
        along = down * angle.sin() + across * angle.cos()
        beside = (down * angle.cos() - across * angle.sin()).abs()
        mark = _inside(MARK / 2 - beside) * (along > 0) * band
        ring = ring * (1 - mark) + mark * (stripes if k == 0 else 0.5)
    return 2 * ring[:, None] - 1


def _inside(depth: Tensor) -> Tensor:
    """How much of a pixel lies inside, in [0, 1], where its centre is ``depth`` pixels from the edge."""
    return (depth + 0.5).clamp(0, 1)


class Rings(LightningDataModule):
    """Batches of ``(image, label)``: images (B, 1, 64, 64) of [-1, 1] under Gaussian noise, labels (B,) in 0..7.

    Rings are the same in every run; training images get their noise anew each time, from torch's global generator, those of
    validation have got theirs once and for all.

    Args:
        batch_size: B.
        num_train_images: rings that are drawn for training, >= 1.
        num_val_images: for validation, >= 1.
        noise: deviation of the noise on every pixel, >= 0.
    """

    def __init__(
        self, batch_size: int = 64, num_train_images: int = 8192, num_val_images: int = 512, noise: float = 0.5
    ) -> None:
        super().__init__()
        for name, value in (("num_train_images", num_train_images), ("num_val_images", num_val_images)):
            if value < 1:
                raise ValueError(f"Rings({name}={value}): expected 1 or more.")
        if not noise >= 0:
            raise ValueError(f"Rings({noise=}): expected a deviation of 0 or more, where pixels are in -1 to 1.")
        self.batch_size = batch_size
        self.num_train_images = num_train_images
        self.num_val_images = num_val_images
        self.noise = noise

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)  # The data set stays the same whatever seed a run has.
        images, labels = draw_rings(self.num_val_images, generator)
        noise = self.noise * torch.randn(images.shape, generator=generator)
        self.val_set = TensorDataset(images + noise, labels)
        self.train_set = TensorDataset(*draw_rings(self.num_train_images, generator))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True, collate_fn=self._noisy)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, self.batch_size)

    def _noisy(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        images, labels = default_collate(samples)
        return [images + self.noise * torch.randn(images.shape), labels]
