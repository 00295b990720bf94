"""Cutout: set a square of each image to zero (DeVries & Taylor 2017)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation._boxes import inside
from lightning_eff.data.augmentation._engine import ImageAugmentation


def squares(count: int, length: int, side: tuple[int, int], generator: Generator, device: torch.device) -> Tensor:
    """Return masks of squares of ``s x s`` pixels, clipped at the border: (count, H, W), bool.

    The centre of a square is drawn uniformly from all pixels. So a pixel at a distance of at least ``s`` from every border is
    covered with probability ``s^2 / (H W)``.

    Args:
        count: the number of squares.
        length: ``s``, in pixels, at least 1.
        side: H and W.
        generator: draws the centres.
        device: the device of the masks.
    """
    rows, columns = (torch.randint(0, size, (count,), generator=generator) for size in side)
    every = torch.full((count,), length)
    return inside(rows - length // 2, columns - length // 2, every, every, side, device)


class Cutout(ImageAugmentation):
    """Set a square of each training image to zero, at a random position.

    The centre of the square is drawn uniformly from all pixels, and the square is clipped at the border. So some images lose
    only a little, which the authors found important. All other pixels and the labels are unchanged. Techniques that mix or
    select samples receive the erased images.

    Use it when you train for many epochs and the model overfits. It costs little time per step. In strong recipes it hardly
    helps (Composer's finding). Images must be normalised, so that zero is their mean.

    It logs ``share``, the mean fraction of pixels erased in the last micro-batch, and ``milliseconds``, the host time of the
    augmentation.

    Args:
        length: the side of the square as a fraction of the shorter image side. The paper uses 0.5 for CIFAR-10 (16 of 32
            pixels) and 0.25 for CIFAR-100. It is rounded to whole pixels, at least one. 0 is plain training.
        prob: the probability that an image is changed. 0 is plain training. Also accepted as ``p``.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch, if
            it holds no floating-point images.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[Cutout(length=0.5)])

    References:
        DeVries & Taylor 2017, "Improved Regularization of Convolutional Neural Networks with Cutout", arXiv:1708.04552.
    """

    paper = "DeVries & Taylor 2017, arXiv:1708.04552"
    search_space = SearchSpace({"length": Choice((0.25, 0.5)), "until": Choice((0.8, 1.0))}, no_images)
    neutral_at: ClassVar[Mapping[str, Any]] = {"length": 0.0}

    def __init__(
        self,
        length: Annotated[float, Fraction()] = 0.5,
        *,
        prob: ImageProbability = 1.0,
        until: Until = 1.0,
        keys: Keys = None,
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys)
        self.length = length

    @override
    def mask(self, images: Tensor, generator: Generator) -> Tensor:
        height, width = images.shape[-2:]
        length = max(round(self.length * min(height, width)), 1)
        return squares(len(images), length, (height, width), generator, images.device)

    @override
    def fill(self, images: Tensor, generator: Generator) -> Tensor:
        return images.new_zeros(())
