"""Rings of 64 x 64 pixels with a cut to find, after Landolt's: drawn here, so that every machine has them.

Each image has a ring with one cut right through and two notches of its outer half alone, in three of eight directions; the
label is the direction of the cut. It is a fair task for what trains on smaller images or on fewer patches:

- Cut and notch differ in two to three pixels, as letters do that are read by eye charts: at half the side in one or so, under
  the same noise, so that who trains on small images throughout can know less than who sees full ones.
- What is coarse helps none the less: that there is a ring, where it lies, which three directions are in question. So small
  images can teach something first, and it is open whether that pays.
- No shortcut: every image has as many pixels of ring but for the notches' other half, wherever the cut is; directions are
  drawn evenly, and rings move and differ in size.
- All eight directions lie on patches that random subsets may lack: who drops patches can miss the very one that tells.
"""

import math

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

SIDE = 64  # pixels
DIRECTIONS = 8
_DRAWN = 256  # rings that are drawn at once: memory stays small


def draw_rings(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 64, 64) in [-1, 1], rings on a background of -1, and labels (count,), the directions of the cuts.

    Radii are 18 to 24 pixels, strokes 4 wide, cuts and notches 3 wide; centres lie up to 3 pixels from the middle.
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
        directions: (count, 3), in eighths of a turn from the right by way of below: the cut's, and two notches'.
        centre: (count, 2), rows down and columns across, in pixels.
        radius: (count,), of the middle of the stroke, in pixels.
    """
    at = torch.arange(SIDE, dtype=torch.float32)
    down, across = at[:, None] - centre[:, 0, None, None], at[None, :] - centre[:, 1, None, None]  # (count, 64, 64)
    distance, middle = (down**2 + across**2).sqrt(), radius[:, None, None]
    ring, outer = _inside(2.0 - (distance - middle).abs()), _inside(distance - middle)
    for k in range(directions.shape[1]):
        angle = directions[:, k, None, None] * (2 * math.pi / DIRECTIONS)
        along = down * angle.sin() + across * angle.cos()
        beside = (down * angle.cos() - across * angle.sin()).abs()
        gap = _inside(1.5 - beside) * (along > 0)
        ring = ring * (1 - (gap if k == 0 else gap * outer))
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
        self, batch_size: int = 64, num_train_images: int = 8192, num_val_images: int = 512, noise: float = 0.3
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
