"""Cutout: a square of each image becomes zero (DeVries & Taylor 2017)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_images
from lightning_eff.data.augmentation._boxes import inside
from lightning_eff.data.augmentation._engine import ImageAugmentation

WHO = "Cutout"


def squares(count: int, length: int, side: tuple[int, int], generator: Generator, device: torch.device) -> Tensor:
    """Squares of ``s x s`` pixels whose centres are any pixel, as likely; they end at the border. (count, H, W), of bool.

    A pixel that lies ``s`` from every border is in one with the chance ``s^2 / (H W)``.

    Args:
        count: of squares.
        length: ``s``, in pixels, >= 1.
        side: H and W.
        generator: of the centres.
        device: of the masks.
    """
    rows, columns = (torch.randint(0, size, (count,), generator=generator) for size in side)
    every = torch.full((count,), length)
    return inside(rows - length // 2, columns - length // 2, every, every, side, device)


class Cutout(ImageAugmentation):
    """Set a square of each training image to zero, in another place of each.

    The centre is any pixel, as likely, and the square ends at the border, which the authors found to matter: some images lose
    little. Zero is the mean of images that the data set has normalised, as it must; all other pixels are bit for bit what they
    were, and labels stay. Techniques that mix samples or choose among them get images that have been erased.

    It regularises and costs a little time at each step; it pays over many epochs alone, and under strong recipes hardly
    (Composer).

    Logged: ``share``, the mean share of pixels that were erased in the last micro-batch, and ``milliseconds``, what it took of
    the host.

    Args:
        length: of the square's side, as a share of the images' shorter side, in [0, 1]: 0.5 is the paper's 16 pixels of
            CIFAR-10's 32, 0.25 its 8 for CIFAR-100. 0 is plain training. It is rounded to pixels, at least one.
        prob: the chance of an image to be changed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on images are left alone; 0 is plain training.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images of floating point.

    Sources:
        DeVries & Taylor 2017, arXiv:1708.04552.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "DeVries & Taylor 2017, arXiv:1708.04552"
    constraints: ClassVar[str] = "automatic optimization; images (B, C, H, W) of floating point, normalised"
    survey: ClassVar[Survey | None] = Survey("data augmentation (Cutout)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"length": Choice((0.25, 0.5)), "until": Choice((0.8, 1.0))}, no_images
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}
    order: ClassVar[int] = 0

    def __init__(
        self,
        length: float = 0.5,
        *,
        prob: float = 1.0,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        check_number(
            length, who=WHO, name="length", low=0, high=1, what="a share of the shorter side; 0 is plain training"
        )
        super().__init__(prob=prob, until=until, keys=keys)
        self.length = length

    @property
    @override
    def neutral(self) -> bool:
        return super().neutral or self.length == 0.0

    @override
    def mask(self, images: Tensor, generator: Generator) -> Tensor:
        height, width = images.shape[-2:]
        length = max(round(self.length * min(height, width)), 1)
        return squares(len(images), length, (height, width), generator, images.device)

    @override
    def fill(self, images: Tensor, generator: Generator) -> Tensor:
        return images.new_zeros(())
