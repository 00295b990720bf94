"""EfficientTrain: train on the low frequencies of images first (Wang et al. 2022, arXiv:2211.09703)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._arguments.stages import Stages
from lightning_eff._core._images.images import Side
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._resolution import ImageKeys, SmallerImages, no_images

WHO = "EfficientTrain"
_STAGES = ((0.0, 160 / 224), (0.6, 192 / 224), (0.8, 1.0))
_HINT = "For example, give stages=[(0, 0.714), (0.6, 0.857), (0.8, 1)], close to the default."


def fourier_crop(images: Tensor, side: Side) -> Tensor:
    """Reduce images (..., H, W) to their lowest frequencies (..., B, B'): ``x_c = (B / H)^2 F^-1(crop_B(F(x)))``.

    Frequencies below B / 2 (in cycles per image) are sampled exactly, higher ones are removed, and the mean stays. At B = H the
    image is unchanged.

    Args:
        images: float32 or float64.
        side: (B, B'), at most (H, W).
    """
    full = images.shape[-2:]
    if tuple(full) == tuple(side):
        return images
    spectrum = torch.fft.fft2(images)
    for dim, size, kept in zip((-2, -1), full, side, strict=True):
        low = torch.cat([torch.arange((kept + 1) // 2), torch.arange(size - kept // 2, size)])  # 0, 1, .., -2, -1
        spectrum = spectrum.index_select(dim, low.to(images.device))
    return torch.fft.ifft2(spectrum).real * (side[0] * side[1] / (full[0] * full[1]))


def stage_at(u: float, stages: Sequence[tuple[float, float]]) -> float:
    """Find the fraction of the full side at the used fraction ``u`` of the budget, that of the last stage that has begun."""
    return [share for start, share in stages if u >= start][-1]


def _small_throughout(technique: "EfficientTrain") -> Mapping[str, Callback]:
    """Train at the size of the first stage for the whole run."""
    if technique.neutral or len(technique.stages) == 1:
        return {}
    share = technique.stages[0][1]
    arm = EfficientTrain(stages=((0.0, share),), multiple_of=technique.multiple_of, keys=technique.keys)
    return {f"{share:.3g} of the side throughout": arm}


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Build three stages like the paper's: the second begins at three quarters of ``until``, halfway to the full side."""
    first, until = values["first"], values["until"]
    return cls(stages=((0.0, first), (0.75 * until, (1.0 + first) / 2), (until, 1.0)))


class EfficientTrain(SmallerImages):
    """Train on the low frequencies of images first, then on more of them, and on full images at the end.

    In each stage, images (H, W) become (B, B'), a fraction of their height and width, by cropping their spectrum. The remaining
    frequencies are exact, and the smaller images are cheaper to process. The default stages are the paper's 160, 192 and 224 of
    224 pixels for 60, 20 and 20 % of the budget. Sides are rounded to the nearest multiple of ``multiple_of`` (and of the patch
    size) and stay the same within an accumulation window. Validation, test and prediction use full images.

    Use it where low frequencies teach most of the task. If only full images show the answer, it loses: on ``benchmarks/rings``,
    whose stripes 48 of 64 pixels still show, it was behind plain training after half a minute on one CPU thread. It lost less
    than :class:`ProgressiveResizing` from half of the side, and was far ahead of small images throughout (docs/evidence.md).

    The images in the batch are found, other tensors of their size are resized with them, and positions are interpolated. Every
    size is tried before any weight has changed. :class:`ProgressiveResizing` documents the details.
    The first and last pixels of an image are neighbors to the Fourier transform, so edges ring if they differ much. The paper
    also increases the magnitude of RandAugment linearly from 0 to 9 over the run: add ``RandAugment(2, 9,
    initial_magnitude=0)``, which acts on the full images before they are reduced.

    It logs ``side`` (the height of the last step's images in pixels) and ``share`` (its fraction of the full height).

    Args:
        stages: pairs ``(u, share)``. From the used fraction ``u`` of the budget on, images have ``share`` of their height and
            width. The first ``u`` is 0, and both values rise. ``[[0.0, 1.0]]`` is plain training.
        multiple_of: the number of pixels that smaller sides are multiples of.
        keys: the tensors (N, C, H, W) that are images, by name (dict, dataclass) or position (tuple, list). Give them if the
            images are not found by their shape.

    Raises:
        ValueError: for a value out of range. At the first batch, before any weight has changed, if it has no images, no size of
            the run is smaller, or the module cannot process some size.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[EfficientTrain()])
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[EfficientTrain([(0, 0.5), (0.6, 0.75), (0.8, 1)])])
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[EfficientTrain(), RandAugment(2, 9, initial_magnitude=0)])

    References:
        Wang et al. 2022, "EfficientTrain: Exploring Generalized Curriculum Learning for Training Visual Backbones",
        arXiv:2211.09703. Wang et al. 2024, "EfficientTrain++", arXiv:2405.08768.
    """

    saves = "compute and activations early in training: about half of a step at 160 of 224 pixels"
    paper = "Wang et al. 2022, arXiv:2211.09703"
    search_space = SearchSpace({"first": Choice((0.5, 160 / 224)), "until": Uniform(0.4, 0.9)}, no_images, _from_shares)
    control = Control("small images throughout, validated at full size", _small_throughout)
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveResizing": "both set the size of each step's images",
    }

    def __init__(
        self,
        stages: Annotated[Sequence[tuple[float, float]], Stages("fraction of the side", hint=_HINT)] = _STAGES,
        *,
        multiple_of: Annotated[int, Count()] = 4,
        keys: ImageKeys = None,
    ) -> None:
        super().__init__(multiple_of=multiple_of, keys=keys)
        self.stages = [*stages]

    @property
    @override
    def neutral(self) -> bool:
        return self.stages[0][1] == 1.0

    @property
    @override
    def changes_shapes(self) -> bool:
        return len(self.stages) > 1

    @override
    def share_of(self, u: float) -> float:
        return stage_at(u, self.stages)

    @override
    def shares(self) -> Iterable[float]:
        return [share for _, share in self.stages]

    @override
    def rescaled(self, images: Tensor, side: Side) -> Tensor:
        return fourier_crop(images, side)
