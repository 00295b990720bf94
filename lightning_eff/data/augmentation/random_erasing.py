"""Random erasing: rectangles of many sizes and shapes become noise (Zhong et al. 2017)."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_images
from lightning_eff.data.augmentation._boxes import inside
from lightning_eff.data.augmentation._engine import ImageAugmentation

WHO = "RandomErasing"
Range = tuple[float, float]
_TRIES = 64  # at once; those that fit are drawn from the same distribution whatever the number


def rectangles(
    count: int, area: Range, ratio: Range, side: tuple[int, int], generator: Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rectangles that lie within the image: ``h = sqrt(a H W r)`` and ``w = sqrt(a H W / r)``, drawn until they fit.

    ``a`` and ``r`` are drawn evenly from their ranges, and then a place, of all that there are.

    Args:
        count: n, how many.
        area: the least and the largest ``a``, shares of the image.
        ratio: the least and the largest ``r = h / w``.
        side: H and W, in pixels.
        generator: of all draws.

    Returns:
        The first row, the first column, rows and columns of each, (n,) of integers.
    """
    total = side[0] * side[1]
    height, width = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    left = torch.arange(count)
    while len(left):
        a, r = (
            torch.rand(len(left), _TRIES, generator=generator, dtype=torch.float64) * (high - low) + low
            for low, high in (area, ratio)
        )
        h, w = (a * total * r).sqrt().round().long(), (a * total / r).sqrt().round().long()
        fits = (h >= 1) & (w >= 1) & (h <= side[0]) & (w <= side[1])
        first = fits.long().argmax(dim=1, keepdim=True)
        found = fits.any(dim=1)
        height[left[found]], width[left[found]] = h.gather(1, first)[found, 0], w.gather(1, first)[found, 0]
        left = left[~found]
    places = torch.rand(2, count, generator=generator, dtype=torch.float64)
    top, begin = ((u * (size - n + 1)).long() for u, size, n in zip(places, side, (height, width), strict=True))
    return top, begin, height, width


def some_fit(area: Range, ratio: Range, side: tuple[int, int]) -> bool:
    """Whether a good part of the areas and ratios gives a rectangle within images of ``side``: else drawing would not end."""
    a, r = (torch.linspace(low, high, 41, dtype=torch.float64) for low, high in (area, ratio))
    h, w = ((side[0] * side[1] * x).sqrt().round() for x in (torch.outer(a, r), torch.outer(a, 1 / r)))
    fits = (h >= 1) & (w >= 1) & (h <= side[0]) & (w <= side[1])
    return bool(fits.double().mean() >= 0.05)


class RandomErasing(ImageAugmentation):
    """Fill a rectangle of some training images with noise, of another size, shape and place in each.

    With the chance ``prob`` an image loses a rectangle that takes an evenly drawn share ``area`` of it, with an evenly drawn
    ratio of height to width, anywhere; what does not fit into the image is drawn again. It is filled with noise of the normal
    distribution (``fill="normal"``: as timm does with normalised images, where the paper's evenly drawn bytes do not exist),
    or with zeros. All other pixels are bit for bit what they were, and labels stay. Techniques that mix samples or choose among
    them get images that have been erased.

    It regularises and costs a little time at each step; it pays over many epochs alone.

    Logged: ``share``, the mean share of pixels that were erased in the last micro-batch, and ``milliseconds``, what it took of
    the host.

    Args:
        prob: the chance of an image to be changed, in [0, 1]; 0.5 is the paper's, 0 plain training.
        area: the least and the largest share of an image that is erased, in (0, 1].
        ratio: the least and the largest height over width, above 0.
        fill: ``"normal"`` for noise of mean 0 and deviation 1, ``"zero"`` for zeros.
        until: the share of the budget in [0, 1] from which on images are left alone; 0 is plain training.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images of floating point, or hardly any such rectangle fits
            into them.

    Sources:
        Zhong et al. 2017, arXiv:1708.04896.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Zhong et al. 2017, arXiv:1708.04896"
    constraints: ClassVar[str] = "automatic optimization; images (B, C, H, W) of floating point, normalised"
    survey: ClassVar[Survey | None] = Survey("data augmentation (random erasing)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"prob": Uniform(0.1, 0.5), "until": Choice((0.8, 1.0))}, no_images
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}
    order: ClassVar[int] = 1

    def __init__(
        self,
        prob: float = 0.5,
        *,
        area: Sequence[float] = (0.02, 0.4),
        ratio: Sequence[float] = (0.3, 3.3),
        fill: str = "normal",
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        self.area, self.ratio = _range(area, "area", 1.0), _range(ratio, "ratio", math.inf)
        if fill not in ("normal", "zero"):
            raise ValueError(f"{WHO}({fill=}): expected 'normal' for noise, or 'zero'.")
        super().__init__(prob=prob, until=until, keys=keys)
        self.filling = fill

    @override
    def fits(self, images: Tensor) -> None:
        height, width = images.shape[-2:]
        if not some_fit(self.area, self.ratio, (height, width)):
            raise ValueError(
                f"{WHO}(area={self.area}, ratio={self.ratio}): hardly any such rectangle, of whole pixels, fits into images of"
                f" {height} x {width} pixels; expected that some do. Change area or ratio."
            )

    @override
    def mask(self, images: Tensor, generator: Generator) -> Tensor:
        height, width = images.shape[-2:]
        self.fits(images)
        drawn = rectangles(len(images), self.area, self.ratio, (height, width), generator)
        return inside(*drawn, (height, width), images.device)

    @override
    def fill(self, images: Tensor, generator: Generator) -> Tensor:
        if self.filling == "zero":
            return images.new_zeros(())
        noise = torch.randn(images.shape, generator=generator, dtype=torch.float32)
        return noise.to(images.device, images.dtype)


def _range(value: Sequence[float], name: str, high: float) -> Range:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{WHO}({name}={value!r}): expected two numbers, the least and the largest.")
    for number in value:
        check_number(number, who=WHO, name=name, low=0, high=high, what="two of them, above 0")
    if not 0 < value[0] <= value[1]:
        raise ValueError(f"{WHO}({name}={value!r}): expected two numbers above 0, the smaller one first.")
    return float(value[0]), float(value[1])
