"""AutoAugment: one of 25 learnt sub-policies to each image, two operations with chances and strengths (Cubuk et al. 2018)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import no_images
from lightning_eff.data.augmentation.images._operations import operated, signed
from lightning_eff.data.augmentation.images._policies import Policy
from lightning_eff.data.augmentation.images._tables import LEVELS, TABLES, SubPolicy

WHO = "AutoAugment"
Drawn = tuple[Tensor, Tensor]


def auto_augment(count: int, table: Sequence[SubPolicy], names: Sequence[str], generator: Generator) -> Drawn:
    """For each image a sub-policy, each as likely; of its two operations each is done with its own chance ``p``.

    Args:
        count: of images.
        table: sub-policies.
        names: of all operations in it.
        generator: on the CPU.

    Returns:
        The places of operations among ``names``, in the order in which they are done, -1 for none, and their strengths with a
        random sign: (count, 2) each.
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
    """Do one of 25 sub-policies to each training image, each as likely: two operations, each done with its own chance.

    The sub-policies are those that the authors' search found and published for ImageNet, CIFAR-10 or SVHN, operation, chance
    and one of ten strengths each. Strengths run evenly through the ranges of the paper's table 6, and signs are drawn, as in
    torchvision: the last of the ten is 30 degrees, a shear of 0.3, 45 % of the side, 4 bits of 8, and factors of 0.1 or 1.9.
    Pixels that come from outside of the image are gray. Batches are changed on their device, by kornia's functions; labels
    stay. For CIFAR-10 and SVHN the paper has Cutout beside it, which is a technique of its own here.

    Operations are defined on values from black to white. Say by ``mean``, ``std`` and ``scale`` what the data set has made of
    them: images of floating point from 0 to 1 need none, those from 0 to 255 ``scale=255``, normalised ones their mean and
    standard deviation. Images of uint8 are from 0 to 255 whatever is said, and stay uint8. Images that are not of that range in
    the first batch are an error; what lies beyond it later is clipped, and its share is logged.

    It regularises, makes training fit more slowly, and costs time at each step. :class:`RandAugment`, which needs no search, is
    as good in its authors' comparison, and has a strength that can be tuned.

    Logged: ``share``, the share of the last micro-batch's images to which anything was done; ``clipped``, the share of its
    values that lay beyond the range; and ``milliseconds``, what it took of the host.

    Args:
        policy: "imagenet", "cifar10" or "svhn": for which data the table was found.
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
        Cubuk et al. 2018, arXiv:1805.09501.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Cubuk et al. 2018, arXiv:1805.09501"
    constraints: ClassVar[str] = (
        "pip install 'lightning-eff[augmentation]'; automatic optimization; images (B, C, H, W) of a known range; labels of"
        " whole images"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (AutoAugment)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"policy": Choice(tuple(TABLES)), "until": Choice((0.8, 1.0))}, no_images
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}
    order: ClassVar[int] = -3

    def __init__(
        self,
        policy: str = "imagenet",
        *,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        scale: float = 1.0,
        fill: float = 0.5,
        prob: float = 1.0,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        if policy not in TABLES:
            raise ValueError(f"{WHO}({policy=}): expected one of {', '.join(map(repr, TABLES))}.")
        super().__init__(mean=mean, std=std, scale=scale, fill=fill, prob=prob, until=until, keys=keys)
        self.policy = policy
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
    def done(self, p: Tensor, drawn: Drawn) -> Tensor:
        for which, strength in zip(drawn[0].T, drawn[1].T, strict=True):
            p = operated(p, self.names, which, strength, self.fill)
        return p

    @override
    def _without(self, names: Sequence[str]) -> str:
        return "Take RandAugment(operations=...) with those that have a meaning instead."
