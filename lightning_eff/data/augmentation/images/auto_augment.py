"""AutoAugment: apply one of several learned sub-policies of two operations to each image (Cubuk et al. 2018).

``fast_auto_augment`` searches such a policy without training a network for each candidate (Lim et al. 2019).
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Kind, OneOf
from lightning_eff._core._lightning.names import like
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._core.rng import keyed_generator
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation.images._operations import OPERATIONS, SOME, signed
from lightning_eff.data.augmentation.images._pixels import Fill, Mean, Scale, Std
from lightning_eff.data.augmentation.images._policies import Policy
from lightning_eff.data.augmentation.images._tables import LEVELS, TABLES, Done, SubPolicies, SubPolicy

Drawn = tuple[Tensor, Tensor]
WHO = "fast_auto_augment"


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
    """Apply one of several learned sub-policies, chosen uniformly, to each training image.

    A sub-policy is two operations, each applied with its own probability and strength. The sub-policies are the 25 that the
    authors found by search for ImageNet, CIFAR-10 or SVHN, or your own. The ten strengths are spread uniformly over the ranges
    of the paper's table 6, with a random sign, as in torchvision. The largest is a rotation by 30 degrees, a shear of 0.3, a
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
        policy: the data set for which the sub-policies were found: "imagenet", "cifar10" or "svhn". Or your own sub-policies,
            each two operations ``[name, probability, level]`` with a level from 0 to 9, or the path of a JSON file with them,
            as :func:`fast_auto_augment` finds and saves them.
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
        >>> own = AutoAugment([[["rotate", 0.5, 6], ["equalize", 0.2, None]], [["color", 0.4, 3], ["shear_x", 0.7, 5]]])

    References:
        Cubuk et al. 2018, "AutoAugment: Learning Augmentation Policies from Data", arXiv:1805.09501.
    """

    paper = "Cubuk et al. 2018, arXiv:1805.09501"
    search_space = SearchSpace({"policy": Choice(tuple(TABLES)), "until": Choice((0.8, 1.0))}, no_images)
    order = -3

    def __init__(
        self,
        policy: Annotated[
            Literal["imagenet", "cifar10", "svhn"] | Sequence[Any] | Path, Either(OneOf(*TABLES), SubPolicies())
        ] = "imagenet",
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
        self.policy = policy
        self._table: Sequence[SubPolicy] = TABLES[policy] if isinstance(policy, str) else policy  # pyright: ignore[reportAttributeAccessIssue]
        self._names = tuple(dict.fromkeys(one.name for sub in self._table for one in sub))

    @property
    @override
    def names(self) -> Sequence[str]:
        return self._names

    @override
    def draw(self, count: int, generator: Generator) -> Drawn:
        return auto_augment(count, self._table, self.names, generator)

    @override
    def touched(self, drawn: Drawn) -> Tensor:
        return (drawn[0] >= 0).any(1)

    @override
    def _without(self, names: Sequence[str]) -> str:
        return "Use RandAugment(operations=[...]) without them instead."


# -- the search of a policy


def draw_policy(size: int, names: Sequence[str], generator: Generator) -> list[SubPolicy]:
    """Draw ``size`` sub-policies of two operations: uniform operations, probabilities in [0, 1] and levels in [0, 9].

    Args:
        size: the number of sub-policies.
        names: the operations to draw from.
        generator: on the CPU.
    """
    which = torch.randint(0, len(names), (size, 2), generator=generator).tolist()
    numbers = torch.rand((size, 2, 2), generator=generator, dtype=torch.float64).tolist()

    def done(at: int, p: float, level: float) -> Done:
        return Done(names[at], round(p, 2), round(LEVELS * level, 1))

    return [(done(own[0], *drawn[0]), done(own[1], *drawn[1])) for own, drawn in zip(which, numbers, strict=True)]


class _Augmented:
    """The batches of a loader, with the images changed by a policy, if any. Each iteration makes the same draws.

    Lightning takes it for one loader, as it would not take a list of batches.
    """

    def __init__(self, loader: Iterable[Any], policy: AutoAugment | None, seed: int, trial: int) -> None:
        self.loader, self.policy, self.seed, self.trial = loader, policy, seed, trial

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            if self.policy is None:
                yield batch
                continue
            if index == 0:
                self.policy.fits(batch)
            yield self.policy.changed(batch, keyed_generator(self.seed, WHO, self.trial, index))[0]

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]


@dataclass
class FoundPolicy:
    """The result of :func:`fast_auto_augment`.

    Attributes:
        policy: the sub-policies of the best candidates, for ``AutoAugment(policy=...)``.
        score: the metric on unchanged images.
        scores: the metric of each candidate, in the order in which they were tried.
        best: the indices of the candidates in ``policy``, the best one first.
    """

    policy: list[SubPolicy]
    score: float
    scores: list[float]
    best: list[int]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sub-policies as JSON, which ``AutoAugment(policy="path.json")`` reads."""
        Path(path).write_text(json.dumps(self.policy, indent=1), encoding="utf-8")


def fast_auto_augment(
    module: LightningModule,
    loader: Iterable[Any],
    *,
    metric: str = "val_loss",
    mode: Literal["min", "max"] = "min",
    trials: int = 200,
    size: int = 5,
    keep: int = 10,
    operations: Sequence[str] | None = None,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    scale: float = 1.0,
    fill: float = 0.5,
    seed: int = 0,
    trainer: Trainer | None = None,
) -> FoundPolicy:
    """Search a policy for :class:`AutoAugment` on your own images, by density matching.

    A policy suits a data set if a network that was trained on unchanged images also recognises changed ones. So train your
    module without augmentation on one part of the training set, and pass the other part as ``loader``. Each candidate is a few
    random sub-policies. Its score is the module's own validation metric on the changed images. The sub-policies of the best
    candidates together are the policy. Then train on the whole training set with it.

    No network is trained in the search. It takes ``trials + 1`` validation runs on ``loader``, and a few thousand images are
    enough. The result is the same for the same seed, module and data. The module and the global random state stay unchanged.

    The score prefers weak operations, because they change images least. The paper draws candidates by Bayesian optimization and
    averages over 5 splits of the data, each with its own network. Here candidates are random. To use several splits, call this
    function for each, and join the lists ``policy``. Compare the result with :class:`RandAugment`, which needs no search.

    Args:
        module: a module that was trained on other images, without augmentation.
        loader: batches for ``validation_step`` with images that the module was not trained on, in a fixed order.
        metric: the name of a metric that the module logs in validation.
        mode: whether the metric should be small ("min") or large ("max").
        trials: the number of candidates. The paper uses 200.
        size: the number of sub-policies of a candidate. The paper uses 5.
        keep: the number of best candidates whose sub-policies make the policy, at most ``trials``. The paper uses 10.
        operations: the operations to draw from. None takes those of :class:`RandAugment` and "invert", without "identity".
        mean: the value that the data set subtracts from pixels, as for :class:`AutoAugment`.
        std: the value that the data set divides by.
        scale: the largest value of pixels before normalisation, such as 1 or 255.
        fill: the value of pixels from outside of the image, from 0 (black) to 1 (white).
        seed: the seed of candidates and of their draws.
        trainer: the Trainer that evaluates, with one process; None for one device without logs.

    Returns:
        The policy, with the metric of each candidate.

    Raises:
        ValueError: for a value out of range, if the metric is not logged, if the Trainer has several processes, or if the
            images cannot be changed, as for :class:`AutoAugment`.
        ImportError: if kornia is not installed.

    Example:
        >>> found = lightning_eff.fast_auto_augment(module, held_out, metric="val_loss", mean=0.5, std=0.25)
        >>> found.save("policy.json")
        >>> trainer = L.Trainer(max_epochs=200, callbacks=[AutoAugment(found.policy, mean=0.5, std=0.25)])

    References:
        Lim et al. 2019, "Fast AutoAugment", arXiv:1905.00397.
    """
    _check("mode", mode, OneOf("min", "max"))
    _check("trials", trials, Count())
    _check("size", size, Count())
    _check("keep", keep, Count(at_most=trials))
    _check("operations", operations, SOME, optional=True)
    names = [name for name in OPERATIONS if name != "identity"] if operations is None else list(operations)
    if trainer is not None and trainer.world_size > 1:
        raise ValueError(
            f"{WHO}(trainer=...): the Trainer has {trainer.world_size} processes, which would draw and score parts of the data"
            " apart. Pass a Trainer with devices=1."
        )
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with undisturbed():
        runs = like(module, Trainer)(devices=1, **dict.fromkeys(off, False)) if trainer is None else trainer

    def score(batches: Any) -> float:
        with undisturbed():
            torch.manual_seed(seed)
            runs.validate(module, batches, verbose=False)
        if metric not in runs.callback_metrics:
            raise ValueError(
                f"{WHO}(metric={metric!r}): validation logged {', '.join(sorted(runs.callback_metrics)) or 'no metric'}. Name"
                " one of the metrics that the module logs in validation_step."
            )
        return float(runs.callback_metrics[metric])

    plain = score(_Augmented(loader, None, seed, -1))
    candidates, scores = list[list[SubPolicy]](), list[float]()
    for trial in range(trials):
        candidates.append(draw_policy(size, names, keyed_generator(seed, WHO, trial)))
        policy = AutoAugment(candidates[-1], mean=mean, std=std, scale=scale, fill=fill)
        scores.append(score(_Augmented(loader, policy, seed, trial)))

    def order(trial: int) -> float:
        value = scores[trial] if mode == "min" else -scores[trial]
        return math.inf if math.isnan(value) else value

    best = sorted(range(trials), key=order)[:keep]
    return FoundPolicy([sub for trial in best for sub in candidates[trial]], plain, scores, best)


def _check(name: str, value: Any, kind: Kind, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    try:
        kind(value)
    except (ValueError, TypeError):
        raise ValueError(f"{WHO}({name}={value!r}): expected {kind.expected}.") from None
