"""Random flips: mirror images left to right, or top to bottom."""

from typing import Literal

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation.images._moving import Moving


def flips(count: int, size: int, prob: float, generator: Generator) -> Tensor:
    """Return ``0, 1, .., size - 1``, or with probability ``prob`` its reverse, for each image: (count, size)."""
    along = torch.arange(size)
    flipped = torch.rand(count, generator=generator, dtype=torch.float32) < prob
    return torch.where(flipped[:, None], along.flip(0), along)


class RandomFlip(Moving):
    """Mirror each training image with probability ``prob``: left to right, top to bottom, or each of both.

    This is torchvision's ``RandomHorizontalFlip`` and ``RandomVerticalFlip``, for a whole batch on its device. Every image of
    the batch has its own draw. If a sample has several images, such as two cameras, all of them are flipped alike, unless
    ``independent`` is set. A resumed run draws the same flips as an uninterrupted one, with any number of worker processes.

    Use it if a mirrored image has the same label, as most photographs do. Do not use it for digits, text or sides of the body:
    labels are not changed, and the technique cannot see what they mean. It costs little time per step.

    It logs ``share``, the fraction of images changed in the last micro-batch, and ``milliseconds``, the host time of the
    augmentation.

    Args:
        prob: the probability that an image is flipped, for each direction independently. Also accepted as ``p``. 0 is plain
            training.
        direction: "horizontal" exchanges left and right, "vertical" exchanges top and bottom, and "both" does each of the two
            with probability ``prob``.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point or uint8, shape (B, C, H, W). None takes all
            such tensors.
        independent: whether each image tensor of a batch has draws of its own, as the views of self-supervised learning need.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if it holds no images, or masks, boxes or keypoints that would no longer match them.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[RandomCrop(padding=4), RandomFlip()])

    References:
        He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2.
    """

    paper = "He et al. 2015, arXiv:1512.03385"
    search_space = SearchSpace({"until": Choice((0.8, 1.0))}, no_images)
    order = -4  # after crops, before operations on the values of pixels

    def __init__(
        self,
        prob: ImageProbability = 0.5,
        *,
        direction: Literal["horizontal", "vertical", "both"] = "horizontal",
        until: Until = 1.0,
        keys: Keys = None,
        independent: bool = False,
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys)
        self.independent = independent
        self.direction: Literal["horizontal", "vertical", "both"] = direction

    @override
    def places(self, count: int, side: tuple[int, int], generator: Generator) -> tuple[Tensor, Tensor]:
        rows = flips(count, side[0], 0.0 if self.direction == "horizontal" else self.prob, generator)
        columns = flips(count, side[1], 0.0 if self.direction == "vertical" else self.prob, generator)
        return rows, columns
