"""Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; they come with the package, nothing is downloaded."""

import torch
from lightning import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

NUM_EVAL_IMAGES = 250  # for validation, and as many for test
SPLIT_SEED = 0  # The split is part of the data set: it stays the same whatever seed a run has.


class Digits(LightningDataModule):
    """Batches of ``(image, label)``: images (B, 1, 8, 8) in [-1, 1] and labels (B,) in 0..9.

    Args:
        batch_size: B.
        num_workers: loader processes; the images are in memory, so the main process is fast enough.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        pixels, digits = load_digits(return_X_y=True)  # (1797, 64) in 0..16, (1797,)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1
        labels = torch.from_numpy(digits).long()
        order = list(range(len(labels)))
        train, rest = train_test_split(
            order, test_size=2 * NUM_EVAL_IMAGES, stratify=labels.tolist(), random_state=SPLIT_SEED
        )
        val, test = train_test_split(
            rest, test_size=NUM_EVAL_IMAGES, stratify=labels[rest].tolist(), random_state=SPLIT_SEED
        )
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(images[part], labels[part]) for part in (train, val, test)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.val_set, train=False)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.test_set, train=False)

    def _loader(self, images: TensorDataset, *, train: bool) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(images, self.batch_size, shuffle=train, drop_last=train, num_workers=self.num_workers)
