"""RandAugment: apply random operations of one strength to each image (Cubuk et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Number
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation.images._operations import OPERATIONS, SOME, signed
from lightning_eff.data.augmentation.images._pixels import Fill, Mean, Scale, Std
from lightning_eff.data.augmentation.images._policies import Policy

#: The paper's K = 14.
PAPERS = tuple(name for name in OPERATIONS if name != "invert")
Drawn = tuple[Tensor, Tensor]


def rand_augment(
    count: int, num_operations: int, magnitude: float, names: Sequence[str], generator: Generator
) -> Drawn:
    """Draw ``N`` of ``K`` operations for each image, uniformly, with strength ``M / 10`` and a random sign.

    Args:
        count: the number of images.
        num_operations: ``N``.
        magnitude: ``M``, in [0, 10].
        names: the ``K`` operations.
        generator: on the CPU.

    Returns:
        The indices of operations in ``names``, in the order in which they are applied, and their strengths: (count, N) each.
    """
    which = torch.randint(0, len(names), (count, num_operations), generator=generator)
    return which, signed(names, which, torch.full(which.shape, magnitude / 10, dtype=torch.float64), generator)


def magnitude_at(u: float, first: float, last: float) -> float:
    """Return ``M`` at the used fraction ``u`` of the budget, ``first + (last - first) u``."""
    return first + (last - first) * min(u, 1.0)


class RandAugment(Policy):
    """Apply ``num_operations`` random operations of one strength to each training image.

    Operations are drawn uniformly for each image from identity, auto_contrast, equalize, rotate, solarize, color, posterize,
    contrast, brightness, sharpness, shear_x, shear_y, translate_x and translate_y. Their ranges are those of AutoAugment. At
    ``magnitude=10`` this is a rotation by 30 degrees, a shear of 0.3, a translation by 45 % of the side, 4 of 8 bits, and
    factors of 0.1 or 1.9. At 0, operations with a strength change nothing. The sign is random. As in torchvision, the effect of
    each operation grows with the magnitude. Torchvision's magnitudes 0 to 30 are 0 to 10 here. (In the authors' code,
    posterize, solarize, color, contrast, brightness and sharpness run through their ranges in one direction.)

    Use it for large models and many epochs. The training loss falls more slowly, and each step takes longer. Composer measured
    277 instead of 612 images per second for ResNet-50 on one V100, with operations on the host. Here kornia computes them on
    the device of the batch.

    Operations are defined on values from black to white. Set ``mean``, ``std`` and ``scale`` to the values that the data set
    uses. Images from 0 to 1 need none of them, images from 0 to 255 need ``scale=255``, and normalised images need their
    ``mean`` and ``std``. uint8 images need none of them and stay uint8. If the first batch is outside of the range, an error is
    raised. Later values outside of it are clipped, and their fraction is logged.

    With ``initial_magnitude``, the magnitude changes linearly over the budget and ends at ``magnitude``. EfficientTrain raises
    it from 0 to 9 while its images gain frequencies, and EfficientNetV2 raises it with the size of the images. Combine it with
    :class:`EfficientTrain` or :class:`ProgressiveResizing`. Small images need less regularization. For the views of
    self-supervised learning, set ``independent=True``; otherwise all views of an image get the same operations.

    Color is only defined for one or three channels (and changes nothing with one). With other channels, leave it out of
    ``operations``.

    It logs ``share``, the fraction of images changed in the last micro-batch. ``clipped`` is the fraction of its values outside
    of the range, ``magnitude`` the current magnitude, and ``milliseconds`` the host time of the augmentation.

    Args:
        num_operations: the number of operations per image. The paper uses 2, and 1 to 3 are usual. 0 is plain training. Also
            accepted as ``num_ops``.
        magnitude: the strength of all operations. The paper uses 9 for ResNet-50 on ImageNet.
        initial_magnitude: the magnitude at the start of the run, in [0, 10]. None is ``magnitude``, without a change.
        operations: the operations to draw from. None takes the 14 above. "invert" is also available.
        mean: the value that the data set subtracts from pixels, one number or one per channel.
        std: the value that the data set divides by, one number or one per channel.
        scale: the largest value of pixels before normalisation, such as 1 or 255.
        fill: the value of pixels from outside of the image, from 0 (black) to 1 (white).
        prob: the probability that an image is changed. 0 is plain training. Also accepted as ``p``.
        independent: whether each image tensor of a batch has draws of its own, as the views of self-supervised learning need.
            False changes all tensors of a sample alike, such as the images of two cameras.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point or uint8, shape (B, C, H, W). None takes all
            such tensors.

    Raises:
        ValueError: for a value out of range. At setup, if the run has no end, and ``until`` is below 1 or
            ``initial_magnitude`` is given. At the first batch,
            before any weight changes, if it holds no images, or images outside of the range of values. Also for masks and boxes
            that would no longer match the images, and for channels for which color is not defined.
        ImportError: at setup, if kornia is not installed.

    Example:
        >>> mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
        >>> trainer = L.Trainer(max_epochs=300, callbacks=[RandAugment(2, magnitude=9, mean=mean, std=std)])

    References:
        Cubuk et al. 2019, "RandAugment: Practical automated data augmentation with a reduced search space", arXiv:1909.13719.
        A growing magnitude: Wang et al. 2022, "EfficientTrain", arXiv:2211.09703. Tan & Le 2021, "EfficientNetV2",
        arXiv:2104.00298. For self-supervised learning: Koçyiğit et al. 2023, arXiv:2212.05611.
    """

    paper = "Cubuk et al. 2019, arXiv:1909.13719"
    search_space = SearchSpace(
        {"num_operations": Choice((1, 2, 3)), "magnitude": Uniform(2.0, 10.0), "until": Choice((0.8, 1.0))}, no_images
    )
    order = -2
    logged = ("magnitude",)
    neutral_at: ClassVar[Mapping[str, Any]] = {"num_operations": 0}

    def __init__(
        self,
        num_operations: Annotated[int, Count(at_least=0), Alias("num_ops")] = 2,
        magnitude: Annotated[float, Number(at_least=0, at_most=10)] = 9.0,
        *,
        initial_magnitude: Annotated[float | None, Number(at_least=0, at_most=10)] = None,
        operations: Annotated[Sequence[str] | None, SOME] = None,
        mean: Mean = 0.0,
        std: Std = 1.0,
        scale: Scale = 1.0,
        fill: Fill = 0.5,
        prob: ImageProbability = 1.0,
        independent: bool = False,
        until: Until = 1.0,
        keys: Keys = None,
    ) -> None:
        super().__init__(mean=mean, std=std, scale=scale, fill=fill, prob=prob, until=until, keys=keys)
        self.num_operations = num_operations
        self.magnitude = magnitude
        self.initial_magnitude = initial_magnitude
        self.independent = independent
        self.operations = PAPERS if operations is None else tuple(operations)

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.operations

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        if self.initial_magnitude is not None and not session.progress.limits():
            raise ValueError(
                f"RandAugment(initial_magnitude={self.initial_magnitude:g}): the Trainer has no end (max_steps=-1,"
                " max_epochs=-1, max_time=None), so there is no budget over which the magnitude could change. Set one of them,"
                " or initial_magnitude=None."
            )

    @override
    def draw(self, count: int, generator: Generator) -> Drawn:
        first = self.magnitude if self.initial_magnitude is None else self.initial_magnitude
        self._figures["magnitude"] = magnitude_at(self.session.progress.u, first, self.magnitude)
        return rand_augment(count, self.num_operations, self._figures["magnitude"], self.names, generator)

    @override
    def touched(self, drawn: Drawn) -> Tensor:
        still = torch.tensor([name == "identity" for name in self.names])
        return ~still[drawn[0]].all(1)

    @override
    def _without(self, names: Sequence[str]) -> str:
        left = [name for name in self.names if name not in names]
        return f"Set operations={left}, or remove RandAugment."
