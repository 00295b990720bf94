"""Random crops: pad images, and cut out a random part of the size that they had."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Number
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation._engine import whole_images
from lightning_eff.data.augmentation.images._moving import Moving
from lightning_eff.data.augmentation.images._pixels import PerChannel

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]


def padded(at: Tensor, size: int, mode: PaddingMode) -> Tensor:
    """Return the place in ``0, .., size - 1`` whose value padding puts at each place ``at``, or -1 for none.

    "edge" repeats the last pixel, ``0 0 0 1 2``. "reflect" mirrors about it, ``2 1 0 1 2``. "symmetric" mirrors behind it,
    ``1 0 0 1 2``.
    """
    if mode == "constant":
        return torch.where((at >= 0) & (at < size), at, -1)
    if mode == "edge":
        return at.clamp(0, size - 1)
    double = 2 * size - 2 if mode == "reflect" else 2 * size
    at = at.remainder(max(double, 1))
    return torch.minimum(at, double - int(mode == "symmetric") - at)


def crops(
    count: int, size: int, padding: int, mode: PaddingMode, generator: Generator, acts: Tensor | None = None
) -> Tensor:
    """Return the source of each place of a random part of ``size`` places of a line with ``padding`` at both ends.

    The part begins at any of the ``2 padding + 1`` places with the same probability.

    Args:
        count: the number of lines.
        size: the number of places of a line, without padding.
        padding: in [0, size).
        mode: as for :func:`padded`.
        generator: on the CPU.
        acts: the lines that are cropped, (count,), bool. None is all.

    Returns:
        Places in ``0, .., size - 1``, or -1 for none: (count, size).
    """
    begin = torch.randint(-padding, padding + 1, (count,), generator=generator)
    if acts is not None:
        begin = torch.where(acts, begin, 0)
    return padded(begin[:, None] + torch.arange(size), size, mode)


class RandomCrop(Moving):
    """Shift each training image by up to ``padding`` pixels in each direction: pad it, and crop its own size at random.

    This is torchvision's ``RandomCrop(size, padding)`` with the size of the image itself, for a whole batch on its device. The
    shift is drawn uniformly from ``-padding`` to ``padding`` pixels, for each image and each direction independently. If a
    sample has several images, all of them are shifted alike, unless ``independent`` is set. A resumed run draws the same crops
    as an uninterrupted one, with any number of worker processes.

    Use it for small images, such as CIFAR's, and many epochs. It costs little time per step. Crops that are smaller than the
    images belong in the data set, because validation needs images of the same size. The number of pixels is that of the
    loader's images, also if :class:`ProgressiveResizing` shrinks them.

    ``fill`` is in the units of the batch. With images from 0 to 1 or 0 to 255, 0 is black. With normalised images, 0 is the
    mean, and black is ``-mean / std`` of each channel, as in torchvision's usual order of crop and normalisation.

    It logs ``share``, the fraction of images changed in the last micro-batch, and ``milliseconds``, the host time of the
    augmentation.

    Args:
        padding: the number of pixels that are added at each side, less than the shorter side of the images. 4 is usual for 32
            pixels. 0 is plain training.
        mode: the values of padding. "constant" is ``fill``, "edge" repeats the last pixel, "reflect" mirrors the image about
            its last pixel, and "symmetric" mirrors it with the last pixel. Also accepted as ``padding_mode``.
        fill: the value of padding for "constant", one number or one per channel. uint8 images need integers from 0 to 255.
        prob: the probability that an image is shifted. Also accepted as ``p``. 0 is plain training.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point or uint8, shape (B, C, H, W). None takes all
            such tensors.
        independent: whether each image tensor of a batch has draws of its own, as the views of self-supervised learning need.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if it holds no images, or images that are not larger than ``padding`` or do not fit
            ``fill``. Also for masks, boxes or keypoints that would no longer match the images.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[RandomCrop(padding=4, mode="reflect"), RandomFlip()])

    References:
        He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2.
    """

    paper = "He et al. 2015, arXiv:1512.03385"
    search_space = SearchSpace({"padding": Choice((2, 4)), "mode": Choice(("constant", "reflect"))}, no_images)
    order = -5  # before flips
    neutral_at: ClassVar[Mapping[str, Any]] = {"padding": 0}

    def __init__(
        self,
        padding: Annotated[int, Count(at_least=0)] = 4,
        *,
        mode: Annotated[PaddingMode, Alias("padding_mode")] = "constant",
        fill: Annotated[float | Sequence[float], PerChannel(Number())] = 0.0,
        prob: ImageProbability = 1.0,
        until: Until = 1.0,
        keys: Keys = None,
        independent: bool = False,
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys)
        self.independent = independent
        self.padding = padding
        self.mode: PaddingMode = mode
        self.fill = fill

    @override
    def look(self, step: Step, batch: Any) -> None:
        super().look(step, batch)
        fills = list(self.fill) if isinstance(self.fill, Sequence) else [self.fill]
        for images in whole_images(batch, self.keys, who="RandomCrop"):
            _, channels, height, width = images.shape
            if min(height, width) <= self.padding:
                raise ValueError(
                    f"RandomCrop(padding={self.padding}): the images have {height} x {width} pixels, so a crop could hold none"
                    " of them. Set padding= to less than the shorter side."
                )
            if len(fills) not in (1, channels):
                raise ValueError(
                    f"RandomCrop(fill={fills}): the images {tuple(images.shape)} have {channels} channels. Give one number, or"
                    " one for each channel."
                )
            if not images.is_floating_point() and any(value not in range(256) for value in fills):
                raise ValueError(
                    f"RandomCrop(fill={self.fill}): the images {tuple(images.shape)} are uint8. Give integers from 0 to 255."
                )

    @override
    def places(self, count: int, side: tuple[int, int], generator: Generator) -> tuple[Tensor, Tensor]:
        acts = torch.rand(count, generator=generator, dtype=torch.float32) < self.prob
        rows, columns = (crops(count, size, self.padding, self.mode, generator, acts) for size in side)
        return rows, columns
