"""RandAugment: some operations, drawn evenly, to each image, all of one strength (Cubuk et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_images
from lightning_eff.data.augmentation.images._operations import OPERATIONS, check_names, operated, signed
from lightning_eff.data.augmentation.images._policies import Policy

WHO = "RandAugment"
#: The paper's K = 14.
PAPERS = tuple(name for name in OPERATIONS if name != "invert")
Drawn = tuple[Tensor, Tensor]


def rand_augment(
    count: int, num_operations: int, magnitude: float, names: Sequence[str], generator: Generator
) -> Drawn:
    """For each image ``N`` operations, each of ``K`` with the chance ``1 / K``, of the strength ``M / 10`` or its negative.

    Args:
        count: of images.
        num_operations: ``N``.
        magnitude: ``M``, in [0, 10].
        names: the ``K`` operations.
        generator: on the CPU.

    Returns:
        The places of operations among ``names``, in the order in which they are done, and their strengths: (count, N) each.
    """
    which = torch.randint(0, len(names), (count, num_operations), generator=generator)
    return which, signed(names, which, torch.full(which.shape, magnitude / 10, dtype=torch.float64), generator)


class RandAugment(Policy):
    """Do ``N`` operations to each training image, drawn evenly of 14 for each image by itself, all of the strength ``M``.

    The operations are identity, auto_contrast, equalize, rotate, solarize, color, posterize, contrast, brightness, sharpness,
    shear_x, shear_y, translate_x and translate_y, with the ranges of AutoAugment: at ``M = 10`` 30 degrees, a shear of 0.3,
    45 % of the side, 4 bits of 8, and factors of 0.1 or 1.9; at 0 those with a strength do nothing. Signs are drawn. So
    strength grows with ``M`` for every operation, as in torchvision, whose 31 steps of magnitude are 0 to 10 here; the authors'
    code lets posterizing, solarizing and the factors of color, contrast, brightness and sharpness run through their ranges
    one way. Pixels that come from outside of the image are gray. Batches are changed on their device, by kornia's functions;
    labels stay.

    Operations are defined on values from black to white. Say by ``mean``, ``std`` and ``scale`` what the data set has made of
    them: images of floating point from 0 to 1 need none, those from 0 to 255 ``scale=255``, normalised ones their mean and
    standard deviation. Images of uint8 are from 0 to 255 whatever is said, and stay uint8. Images that are not of that range in
    the first batch are an error; what lies beyond it later is clipped, and its share is logged. Color has no meaning for other
    than one or three channels (one stays as it is): name the ``operations`` then.

    It regularises, makes training fit more slowly, and costs time at each step; it pays over many epochs and in large models
    alone. Composer found ResNet-50 on one V100 down from 612 to 277 images a second, with operations on its host.

    Logged: ``share``, the share of the last micro-batch's images to which anything was done; ``clipped``, the share of its
    values that lay beyond the range; and ``milliseconds``, what it took of the host.

    Args:
        num_operations: ``N``, >= 0: 2 in the paper, 1 to 3 are usual; 0 is plain training.
        magnitude: ``M``, in [0, 10]: 9 for ResNet-50 on ImageNet in the paper.
        operations: names of those that are drawn from; None takes the 14. "invert" may be named, too.
        mean: that the data set has subtracted, one number or one for each channel.
        std: that it has divided by, above 0.
        scale: the largest value that pixels had before that, such as 1 or 255.
        fill: of pixels from outside of the image, from 0 for black to 1 for white.
        prob: the chance of an image to be changed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on images are left alone; 0 is plain training.
        keys: names or positions of the images (B, C, H, W) of floating point or uint8; None takes all such tensors.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images, images of another range or of channels that have no
            color, or masks and boxes that geometric operations would leave behind.
        ImportError: at setup, where kornia is not installed.

    Sources:
        Cubuk et al. 2019, arXiv:1909.13719.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Cubuk et al. 2019, arXiv:1909.13719"
    constraints: ClassVar[str] = (
        "pip install 'lightning-eff[augmentation]'; automatic optimization; images (B, C, H, W) of a known range; labels of"
        " whole images"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (RandAugment)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"num_operations": Choice((1, 2, 3)), "magnitude": Uniform(2.0, 10.0), "until": Choice((0.8, 1.0))}, no_images
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}
    order: ClassVar[int] = -2

    def __init__(
        self,
        num_operations: int = 2,
        magnitude: float = 9.0,
        *,
        operations: Sequence[str] | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        scale: float = 1.0,
        fill: float = 0.5,
        prob: float = 1.0,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        if isinstance(num_operations, bool) or not isinstance(num_operations, int) or num_operations < 0:
            raise ValueError(f"{WHO}({num_operations=}): expected an integer >= 0; 0 is plain training.")
        check_number(magnitude, who=WHO, name="magnitude", low=0, high=10, what="the strength of all operations")
        if operations is not None:
            check_names(operations, who=WHO, name="operations")
        super().__init__(mean=mean, std=std, scale=scale, fill=fill, prob=prob, until=until, keys=keys)
        self.num_operations = num_operations
        self.magnitude = magnitude
        self.operations = PAPERS if operations is None else tuple(operations)

    @property
    @override
    def neutral(self) -> bool:
        return super().neutral or self.num_operations == 0

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.operations

    @override
    def draw(self, count: int, generator: Generator) -> Drawn:
        return rand_augment(count, self.num_operations, self.magnitude, self.names, generator)

    @override
    def touched(self, drawn: Drawn) -> Tensor:
        still = torch.tensor([name == "identity" for name in self.names])
        return ~still[drawn[0]].all(1)

    @override
    def done(self, p: Tensor, drawn: Drawn) -> Tensor:
        for which, strength in zip(drawn[0].T, drawn[1].T, strict=True):
            p = operated(p, self.names, which, strength, self.fill)
        return p

    @override
    def _without(self, names: Sequence[str]) -> str:
        left = [name for name in self.names if name not in names]
        return f"Leave them out, by operations={left}, or take the technique out."
