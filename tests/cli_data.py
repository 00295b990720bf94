"""What a LightningCLI config can name: data, and functions."""

import lightning.pytorch as pl
import torch.nn.functional as F

from tests.models import TinyClassifier, loader


class Sized(TinyClassifier):
    """A module with arguments that must be given."""

    def __init__(self, size: "int", depth: int) -> None:
        super().__init__()


def unannotated(module, batch):
    """Each sample's loss in ``TinyClassifier``."""
    x, y = batch
    return F.cross_entropy(module(x), y, reduction="none")


class Unannotated:
    """The same, of a class."""

    def __call__(self, module, batch):
        return unannotated(module, batch)


class Classes(pl.LightningDataModule):
    """What ``TinyClassifier`` trains on."""

    def train_dataloader(self):
        return loader("classifier")


class Padded(pl.LightningDataModule):
    """Padded batches of tokens, with a mask, for ``TinyGPT``."""

    def train_dataloader(self):
        return loader("padded")


class Sequences(pl.LightningDataModule):
    """What ``TinyGPT`` trains on."""

    def train_dataloader(self):
        return loader("tiny_gpt")


class Short(pl.LightningDataModule):
    """Texts that leave room in ``TinyGPT``'s table of places."""

    def train_dataloader(self):
        return loader("short")


class Texts(pl.LightningDataModule):
    """What ``Translator`` trains on."""

    def train_dataloader(self):
        return loader("translator")


class Videos(pl.LightningDataModule):
    """What ``VideoMAE`` trains on."""

    def train_dataloader(self):
        return loader("videomae")
