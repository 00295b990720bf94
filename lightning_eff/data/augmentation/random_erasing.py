"""Random erasing: fill a random rectangle of an image with noise (Zhong et al. 2017)."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import refusal
from lightning_eff._core._arguments.kinds import Alias, Each, Fraction, Number
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation._boxes import inside
from lightning_eff.data.augmentation._engine import ImageAugmentation

Range = tuple[float, float]
_TRIES = 64  # drawn at once; the distribution of rectangles does not depend on it


def rectangles(
    count: int, area: Range, ratio: Range, side: tuple[int, int], generator: Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw rectangles within the image, with ``h = sqrt(a H W r)`` and ``w = sqrt(a H W / r)``, until they fit.

    ``a`` and ``r`` are drawn uniformly from their ranges, then the position uniformly from all that are possible.

    Args:
        count: n, the number of rectangles.
        area: the range of ``a``, as fractions of the image.
        ratio: the range of ``r = h / w``.
        side: H and W, in pixels.
        generator: makes all draws.

    Returns:
        The first row, the first column, the number of rows and the number of columns of each: (n,) integers.
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
    """Return whether at least 5 % of the areas and ratios fit into images of ``side``. Otherwise drawing might not end."""
    a, r = (torch.linspace(low, high, 41, dtype=torch.float64) for low, high in (area, ratio))
    h, w = ((side[0] * side[1] * x).sqrt().round() for x in (torch.outer(a, r), torch.outer(a, 1 / r)))
    fits = (h >= 1) & (w >= 1) & (h <= side[0]) & (w <= side[1])
    return bool(fits.double().mean() >= 0.05)


class RandomErasing(ImageAugmentation):
    """Fill a random rectangle of some training images with noise.

    With probability ``prob`` an image loses one rectangle. Its area and its ratio of height to width are drawn uniformly from
    ``area`` and ``ratio``, and its position from all that fit into the image. The rectangle is filled with noise from a normal
    distribution, or with zeros. All other pixels and the labels are unchanged. Techniques that mix or select samples receive
    the erased images.

    Use it when you train for many epochs and the model overfits. It costs little time per step. Images must be normalised: the
    noise has mean 0 and standard deviation 1, as in timm. (The paper fills with uniform bytes, before normalisation.)

    It logs ``share``, the mean fraction of pixels erased in the last micro-batch, and ``milliseconds``, the host time of the
    augmentation.

    Args:
        prob: the probability that an image is changed. The paper uses 0.5. 0 is plain training. Also accepted as ``p``.
        area: the smallest and the largest fraction of an image to erase. Also accepted as ``scale``.
        ratio: the smallest and the largest ratio of height to width.
        fill: the values of erased pixels. "normal" is noise of mean 0 and standard deviation 1, "zero" is zeros.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch, if
            it holds no floating-point images, or if hardly any such rectangle fits into them.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[RandomErasing(prob=0.25)])

    References:
        Zhong et al. 2017, "Random Erasing Data Augmentation", arXiv:1708.04896.
    """

    paper = "Zhong et al. 2017, arXiv:1708.04896"
    search_space = SearchSpace({"prob": Uniform(0.1, 0.5), "until": Choice((0.8, 1.0))}, no_images)
    order = 1

    def __init__(
        self,
        prob: ImageProbability = 0.5,
        *,
        area: Annotated[Sequence[float], Each(Fraction(above=0), length=2), Alias("scale")] = (0.02, 0.4),
        ratio: Annotated[Sequence[float], Each(Number(above=0), length=2)] = (0.3, 3.3),
        fill: Literal["normal", "zero"] = "normal",
        until: Until = 1.0,
        keys: Keys = None,
    ) -> None:
        for name, (low, high) in {"area": area, "ratio": ratio}.items():
            if low > high:
                raise refusal(RandomErasing, name, (low, high), "the smaller number first")
        super().__init__(prob=prob, until=until, keys=keys)
        self.area: Range = (area[0], area[1])
        self.ratio: Range = (ratio[0], ratio[1])
        self.filling = fill

    @override
    def fits(self, images: Tensor) -> None:
        height, width = images.shape[-2:]
        if not some_fit(self.area, self.ratio, (height, width)):
            raise ValueError(
                f"RandomErasing(area={self.area}, ratio={self.ratio}): hardly any such rectangle fits into images of"
                f" {height} x {width} pixels. Use smaller areas, or ratios closer to 1."
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
