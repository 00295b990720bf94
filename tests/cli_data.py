"""Data that a LightningCLI config can name."""

import lightning.pytorch as pl

from tests.models import loader


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
