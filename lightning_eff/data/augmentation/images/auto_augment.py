"""AutoAugment: apply one of 25 learned sub-policies of two operations to each image (Cubuk et al. 2018)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation.images._operations import signed
from lightning_eff.data.augmentation.images._pixels import Fill, Mean, Scale, Std
from lightning_eff.data.augmentation.images._policies import Policy
from lightning_eff.data.augmentation.images._tables import LEVELS, TABLES, SubPolicy

Drawn = tuple[Tensor, Tensor]


def auto_augment(count: int, table: Sequence[SubPolicy], names: Sequence[str], generator: Generator) -> Drawn:
    """Draw a sub-policy for each image, uniformly, and which of its two operations are applied.

    Args:
        count: the number of images.
        table: the sub-policies.
        names: the names of all operations in them.
        generator: on the CPU.

    Returns:
        The indices of operations in ``names``, in the order in which they are applied, -1 for none, and their signed strengths:
        (count, 2) each.
    """
    place = {name: k for k, name in enumerate(names)}
    which = torch.tensor([[place[one.name] for one in sub] for sub in table])
    p = torch.tensor([[one.p for one in sub] for sub in table])
    strength = torch.tensor([[(one.level or 0) / LEVELS for one in sub] for sub in table], dtype=torch.float64)
    chosen = torch.randint(0, len(table), (count,), generator=generator)
    fires = torch.rand((count, 2), generator=generator, dtype=torch.float32) < p[chosen]
    strengths = signed(names, which[chosen], strength[chosen], generator)
    return torch.where(fires, which[chosen], -1), strengths


class AutoAugment(Policy):
    """Apply one of 25 learned sub-policies, chosen uniformly, to each training image.

    A sub-policy is two operations, each applied with its own probability and strength. The sub-policies are those that the
    authors found by search for ImageNet, CIFAR-10 or SVHN. The ten strengths are spread uniformly over the ranges of the
    paper's table 6, with a random sign, as in torchvision. The largest is a rotation by 30 degrees, a shear of 0.3, a
    translation by 45 % of the side, 4 of 8 bits, and factors of 0.1 or 1.9. For CIFAR-10 and SVHN the paper adds
    :class:`Cutout`.

    Use it for many epochs on data like those of the tables. The training loss falls more slowly, and each step takes longer.
    :class:`RandAugment` needs no table, was as good in its authors' comparison, and has a strength that you can tune.
    Operations are computed by kornia on the device of the batch.

    Operations are defined on values from black to white. Set ``mean``, ``std`` and ``scale`` to the values that the data set
    uses. Images from 0 to 1 need none of them, images from 0 to 255 need ``scale=255``, and normalised images need their
    ``mean`` and ``std``. uint8 images need none of them and stay uint8. If the first batch is outside of the range, an error is
    raised. Later values outside of it are clipped, and their fraction is logged.

    It logs ``share``, the fraction of images changed in the last micro-batch. ``clipped`` is the fraction of its values outside
    of the range, and ``milliseconds`` is the host time of the augmentation.

    Args:
        policy: the data set for which the sub-policies were found.
        mean: the value that the data set subtracts from pixels, one number or one per channel.
        std: the value that the data set divides by, one number or one per channel.
        scale: the largest value of pixels before normalisation, such as 1 or 255.
        fill: the value of pixels from outside of the image, from 0 (black) to 1 (white).
        prob: the probability that an image is changed. 0 is plain training. Also accepted as ``p``.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point or uint8, shape (B, C, H, W). None takes all
            such tensors.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if it holds no images, or images outside of the range of values. Also for masks and boxes
            that would no longer match the images, and for channels for which color is not defined.
        ImportError: at setup, if kornia is not installed.

    Example:
        >>> auto_augment = AutoAugment("cifar10", mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262))
        >>> trainer = L.Trainer(max_epochs=200, callbacks=[auto_augment, Cutout(length=0.5)])

    References:
        Cubuk et al. 2018, "AutoAugment: Learning Augmentation Policies from Data", arXiv:1805.09501.
    """

    paper = "Cubuk et al. 2018, arXiv:1805.09501"
    survey = Survey("data augmentation (AutoAugment)", shen="3.1")
    search_space = SearchSpace({"policy": Choice(tuple(TABLES)), "until": Choice((0.8, 1.0))}, no_images)
    order = -3

    def __init__(
        self,
        policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet",
        *,
        mean: Mean = 0.0,
        std: Std = 1.0,
        scale: Scale = 1.0,
        fill: Fill = 0.5,
        prob: ImageProbability = 1.0,
        until: Until = 1.0,
        keys: Keys = None,
    ) -> None:
        super().__init__(mean=mean, std=std, scale=scale, fill=fill, prob=prob, until=until, keys=keys)
        self.policy: Literal["imagenet", "cifar10", "svhn"] = policy
        self._names = tuple(dict.fromkeys(one.name for sub in TABLES[policy] for one in sub))

    @property
    @override
    def names(self) -> Sequence[str]:
        return self._names

    @override
    def draw(self, count: int, generator: Generator) -> Drawn:
        return auto_augment(count, TABLES[self.policy], self.names, generator)

    @override
    def touched(self, drawn: Drawn) -> Tensor:
        return (drawn[0] >= 0).any(1)

    @override
    def _without(self, names: Sequence[str]) -> str:
        return "Use RandAugment(operations=[...]) without them instead."
