"""EfficientTrain: train on the low frequencies of images first (Wang et al. 2022, arXiv:2211.09703)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._images.images import Side
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._resolution import SmallerImages, check_share, no_images

WHO = "EfficientTrain"
_STAGES = ((0.0, 160 / 224), (0.6, 192 / 224), (0.8, 1.0))


def fourier_crop(images: Tensor, side: Side) -> Tensor:
    """``x_c = (B / H)^2 F^-1(crop_B(F(x)))``: images (..., H, W) with their lowest frequencies alone, (..., B, B').

    Frequencies below B / 2 (in cycles over the image) are sampled exactly, those above are gone, and the mean stays. At B = H
    the image is as it was.

    Args:
        images: of float32 or float64.
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
    """The share of the full side at the share ``u`` of the budget: that of the last stage that has begun."""
    return [share for start, share in stages if u >= start][-1]


def _small_throughout(technique: "EfficientTrain") -> Mapping[str, Callback]:
    """The size of the first stage, for the whole run."""
    if technique.neutral or len(technique.stages) == 1:
        return {}
    share = technique.stages[0][1]
    arm = EfficientTrain(stages=((0.0, share),), multiple_of=technique.multiple_of, keys=technique.keys)
    return {f"{share:.3g} of the side throughout": arm}


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Three stages as the paper's: the second begins at three quarters of ``until``, half way to the full side."""
    first, until = values["first"], values["until"]
    return cls(stages=((0.0, first), (0.75 * until, (1.0 + first) / 2), (until, 1.0)))


class EfficientTrain(SmallerImages):
    """Train on images cropped in the Fourier domain: the lowest frequencies first, then more, then all of them.

    In each stage images (H, W) become (B, B'), a share of their height and width, by a crop of their spectrum: what remains
    is exact, and cheaper to compute. The default stages are the paper's 160, 192 and 224 of 224 pixels, for 60, 20 and 20 % of
    the budget; sides are rounded to the nearest multiple of ``multiple_of`` (and of the patches into which a convolution cuts
    images), and hold over an accumulation window. In a stage at the full size, ``training_step`` gets the very batch that the
    loader made. Validation, test and prediction see full images.

    Images are found, other tensors of their size go along, positions are interpolated, and every size is tried before any
    weight has changed, as :class:`ProgressiveResizing` documents. An image's first and last pixels are neighbours to the
    Fourier transform: where they differ much, edges ring.

    The paper's augmentation grows along, RandAugment from magnitude 1 to 9: that is the data set's matter.

    Where only full images tell the answer (``benchmarks/rings``, whose stripes 48 of 64 pixels still hold) it lost in half a
    minute of one CPU thread, though not as much as :class:`ProgressiveResizing` from half of the side, and was far ahead of
    small images throughout (docs/evidence.md). Expect gains where small images teach most of the task.

    Logged: ``side``, the height of the last step's images in pixels, and ``share``, its share of the full one.

    Args:
        stages: (u, share) pairs: from the share ``u`` of the budget on, in [0, 1), images have that share of their height and
            width, in (0, 1]. The first begins at 0; starts and shares rise. ``[[0.0, 1.0]]`` is plain training.
        multiple_of: pixels, >= 1; sides below the full ones are multiples of it.
        keys: names (dict, dataclass) or positions (tuple, list) of the tensors (N, C, H, W) that are images, where looking at
            shapes does not tell.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, before any weight has changed, if it holds no
            images, none would be smaller, or the module cannot do with images of some size of the run.

    Sources:
        Wang et al. 2022, arXiv:2211.09703; Wang et al. 2024, arXiv:2405.08768 (EfficientTrain++).
    """

    saves: ClassVar[str] = "compute and activations early in training: about half of a step at 160 of 224 pixels"
    paper: ClassVar[str] = "Wang et al. 2022, arXiv:2211.09703"
    constraints: ClassVar[str] = (
        "automatic optimization; batches with images (N, C, H, W); modules for images of any size: CNNs with global pooling,"
        " ViTs whose positions can be interpolated; every new size recompiles a compiled module"
    )
    survey: ClassVar[Survey | None] = Survey("EfficientTrain (low frequencies first)", shen="3.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"first": Choice((0.5, 160 / 224)), "until": Uniform(0.4, 0.9)}, no_images, _from_shares
    )
    control: ClassVar[Control] = Control("small images throughout, validated at full size", _small_throughout)
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveResizing": "both say at each step how large its images are",
    }
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        stages: Sequence[Sequence[float]] = _STAGES,
        *,
        multiple_of: int = 4,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        pairs = [tuple(stage) for stage in stages]
        mend = f"expected (u, share) pairs such as {[[u, round(share, 3)] for u, share in _STAGES]}"
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{WHO}({stages=}): {mend}.")
        for start, share in pairs:
            check_share(start, who=WHO, name="u", of="the share of the budget at which a stage begins")
            check_share(share, who=WHO, name="share", of="a share of the full height and width")
        starts, shares = ([pair[i] for pair in pairs] for i in range(2))
        if starts[0] != 0 or starts[-1] >= 1 or sorted(set(starts)) != starts:
            raise ValueError(
                f"{WHO}({stages=}): stages begin at {starts}; {mend}, the first from 0 on and each later than the last."
            )
        if shares[0] <= 0 or sorted(set(shares)) != shares:
            raise ValueError(f"{WHO}({stages=}): shares are {shares}; {mend}, each above 0 and larger than the last.")
        super().__init__(multiple_of=multiple_of, keys=keys)
        self.stages = [(float(start), float(share)) for start, share in pairs]

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
