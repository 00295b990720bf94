"""Scikit-learn's digits with a training set of which a part teaches nothing, or something wrong. Validation stays clean."""

import torch
from torch.utils.data import TensorDataset

from examples.vit.data import Digits

SPOILT_SEED = 1  #: who is spoilt is part of the data set, and the same in every run


class SpoiltDigits(Digits):
    """:class:`Digits` whose training set is as large as ever, of which a part is spoilt.

    Args:
        wrong: the share of the training images whose label is another digit, drawn evenly, in [0, 1).
        repeated: the share of the training set that is made of copies, in [0, 1); the images that these take the place of
            are gone.
        copied: how many images the copies are of, in turn. Shifts and noise are drawn anew for each copy, as for all images.
        kwargs: of :class:`Digits`.
    """

    def __init__(self, wrong: float = 0.0, repeated: float = 0.0, copied: int = 32, **kwargs: int | float) -> None:
        super().__init__(**kwargs)  # pyright: ignore[reportArgumentType]
        for name, value in (("wrong", wrong), ("repeated", repeated)):
            if not 0 <= value < 1:
                raise ValueError(f"SpoiltDigits({name}={value}): expected a share of the training images in [0, 1).")
        if copied < 1:
            raise ValueError(f"SpoiltDigits({copied=}): expected at least 1 image to copy.")
        self.wrong, self.repeated, self.copied = wrong, repeated, copied

    def setup(self, stage: str) -> None:
        super().setup(stage)
        images, labels = (t.clone() for t in self.train_set.tensors)
        generator = torch.Generator().manual_seed(SPOILT_SEED)
        order = torch.randperm(len(labels), generator=generator)
        bad = order[: round(self.wrong * len(labels))]
        labels[bad] = (labels[bad] + torch.randint(1, 10, (len(bad),), generator=generator)) % 10
        lost = order[len(order) - round(self.repeated * len(order)) :]
        source = order[: self.copied][torch.arange(len(lost)) % self.copied]
        images[lost], labels[lost] = images[source], labels[source]
        self.train_set = TensorDataset(images, labels)
