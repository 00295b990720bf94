"""Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; they come with the package, nothing is downloaded."""

import torch
from lightning import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

NUM_HELD_OUT = 500  # for validation and test
SPLIT_SEED = 0  # The split is part of the data set: it stays the same whatever seed a run has.


def shift(images: Tensor, max_shift: int) -> Tensor:
    """Move each image by -max_shift..max_shift whole pixels down and across, as torch's global generator draws.

    Args:
        images: (B, C, H, W) in [-1, 1]; what moves in from outside is background, -1.
        max_shift: pixels, >= 0.
    """
    batch, _, height, width = images.shape
    padded = F.pad(images, [max_shift] * 4, value=-1.0)
    down, across = torch.randint(2 * max_shift + 1, (2, batch))
    rows = (down[:, None] + torch.arange(height))[:, :, None]  # (B, H, 1)
    columns = (across[:, None] + torch.arange(width))[:, None, :]  # (B, 1, W)
    moved = padded[torch.arange(batch)[:, None, None], :, rows, columns]  # (B, H, W, C)
    return moved.permute(0, 3, 1, 2).contiguous()


class Digits(LightningDataModule):
    """Batches of ``(image, label)``: images (B, 1, 8, 8) in [-1, 1] and labels (B,) in 0..9.

    Args:
        batch_size: B.
        num_workers: loader processes; the images are in memory, so the main process is fast enough.
        max_shift: move each training image by up to so many pixels down and across, anew each time, in 0..7.
        num_val_images: how many of the 500 held-out images are for validation, in 10..490; the others are for test.
        noise: deviation of the Gaussian noise on every pixel, >= 0. Training images get it anew each time; those of
            validation and test have got theirs once and for all. Harder, and a loss that moves less from seed to seed.
        num_noises: how many times each image stands in validation and test, each time under other noise.
    """

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        max_shift: int = 0,
        num_val_images: int = 250,
        noise: float = 0.0,
        num_noises: int = 1,
    ) -> None:
        super().__init__()
        if not 0 <= max_shift <= 7:
            raise ValueError(f"Digits({max_shift=}): expected 0 to 7 pixels, less than an image has.")
        if not 10 <= num_val_images <= NUM_HELD_OUT - 10:
            raise ValueError(
                f"Digits({num_val_images=}): expected 10 to {NUM_HELD_OUT - 10} of the {NUM_HELD_OUT} held-out images,"
                " so that validation and test have every digit."
            )
        if not noise >= 0:
            raise ValueError(f"Digits({noise=}): expected a deviation of 0 or more, where pixels are in -1 to 1.")
        if num_noises < 1 or (num_noises > 1 and not noise):
            raise ValueError(f"Digits({num_noises=}, {noise=}): expected 1, or more where there is noise to differ by.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.max_shift = max_shift
        self.num_val_images = num_val_images
        self.noise = noise
        self.num_noises = num_noises

    def setup(self, stage: str) -> None:
        pixels, digits = load_digits(return_X_y=True)  # (1797, 64) in 0..16, (1797,)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1
        labels = torch.from_numpy(digits).long()
        order = list(range(len(labels)))
        train, rest = train_test_split(order, test_size=NUM_HELD_OUT, stratify=labels.tolist(), random_state=SPLIT_SEED)
        val, test = train_test_split(
            rest, test_size=NUM_HELD_OUT - self.num_val_images, stratify=labels[rest].tolist(), random_state=SPLIT_SEED
        )
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set, self.test_set = (
            TensorDataset(self._noisy(images[part]), labels[part].repeat(self.num_noises)) for part in (val, test)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.val_set, train=False)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.test_set, train=False)

    def _loader(self, images: TensorDataset, *, train: bool) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            images,
            self.batch_size,
            shuffle=train,
            drop_last=train,
            num_workers=self.num_workers,
            collate_fn=self._augmented if train and (self.max_shift or self.noise) else None,
        )

    def _augmented(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        images, labels = default_collate(samples)
        if self.max_shift:
            images = shift(images, self.max_shift)
        if self.noise:
            images = images + self.noise * torch.randn(images.shape)
        return [images, labels]

    def _noisy(self, images: Tensor) -> Tensor:
        """``num_noises`` copies of (B, C, H, W) below one another, (num_noises * B, C, H, W), the same in every run."""
        images = images.repeat(self.num_noises, 1, 1, 1)
        return images + self.noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(SPLIT_SEED))
