"""Progressive resizing: train on small images first (Howard 2018; Tan & Le 2021, EfficientNetV2; Composer's schedule)."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Fraction
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._resolution import ImageKeys, Scale, SmallerImages, no_images

WHO = "ProgressiveResizing"
_STEPS = 4096  # points of the ramp to take sizes from, more than images have pixels


def share_at(u: float, *, scale: float, until: float, hold: float) -> float:
    """Compute the fraction of the full side at the used fraction ``u`` of the budget.

    It is ``scale`` for ``u < hold until``, then ``scale + (1 - scale) (u - hold until) / (until - hold until)``, and 1 from
    ``until`` on.
    """
    if u >= until:
        return 1.0
    start = hold * until
    return scale if u <= start else scale + (1.0 - scale) * (u - start) / (until - start)


def _small_throughout(technique: "ProgressiveResizing") -> Mapping[str, Callback]:
    """Train at the first size for the whole run."""
    if technique.neutral or technique.constant:
        return {}
    same = {"scale": technique.scale, "multiple_of": technique.multiple_of, "keys": technique.keys}
    return {f"{technique.scale:g} of the side throughout": ProgressiveResizing(**same, until=1.0, hold=1.0)}


class ProgressiveResizing(SmallerImages):
    """Train on small images first, then on ever larger ones, and on full images at the end.

    Both sides of an image are ``scale`` of the full ones while the used fraction of the budget is below ``hold * until``. They
    grow linearly up to ``until`` and are full from then on. With the defaults, which are Composer's, half of the budget is
    spent at half the side and the last fifth at the full one. Sides are rounded to the nearest multiple of ``multiple_of``
    (and of the patch size) and stay the same within an accumulation window. Validation, test and prediction use full
    images.

    Use it where small images teach most of the task. A convolutional network's step at half the side costs about a quarter. If
    only full images show the answer, it loses: on ``benchmarks/rings`` it was far behind plain training after half a minute on
    one CPU thread, though ahead of small images throughout (docs/evidence.md). Loaders still deliver full images, so the loader
    may limit the speed of small steps. Each new size recompiles a compiled module. Regularization should grow with the size
    (Tan and Le 2021); if that matters, add it in the module or the data set.

    Images are the floating-point tensors (N, C, H, W) anywhere in the batch, or those of uint8 if there are none. They shrink
    bilinearly with antialiasing, in their own dtype and memory format. Other tensors (..., H, W), such as masks, take the
    nearest pixel. A floating-point 4-D target is taken for an image unless ``keys`` names the images. Values in pixels would be
    wrong, so give boxes and keypoints as fractions of the side.

    Before any weight has changed, every size of the run is tried with two samples of the first batch, in forward passes that
    leave no trace. Transformers models that support it interpolate their positions (``interpolate_pos_encoding``). A table with
    a row per patch that a module adds itself is found and interpolated within the graph, so it is trained at all sizes. Other
    modules with fixed positions or flattened features are refused.

    It logs ``side`` (the height of the last step's images in pixels) and ``share`` (its fraction of the full height).

    Args:
        scale: the fraction of the full height and width at the start. 1 is plain training. Also accepted as ``initial_scale``.
        until: the fraction of the budget from which on images are full. 0 is plain training.
        hold: the fraction of ``until`` during which images stay at ``scale``. At 1 they then become full at once.
        multiple_of: the number of pixels that smaller sides are multiples of. Also accepted as ``size_increment``.
        keys: the tensors (N, C, H, W) that are images, by name (dict, dataclass) or position (tuple, list). Give them if the
            images are not found by their shape.

    Raises:
        ValueError: for a value out of range. At the first batch, before any weight has changed, if it has no images, no size of
            the run is smaller, or the module cannot process some size.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ProgressiveResizing(scale=0.5, until=0.8)])

    References:
        Howard 2018 (fast.ai, DAWNBench). Tan and Le 2021, "EfficientNetV2: Smaller Models and Faster Training",
        arXiv:2104.00298. The schedule is that of MosaicML's Composer.
    """

    saves = "compute and activations early in training: at half the side a CNN's step costs a quarter"
    paper = "Howard 2018; Tan & Le 2021, arXiv:2104.00298"
    search_space = SearchSpace(
        {"scale": Choice((0.5, 0.625, 0.75)), "until": Uniform(0.3, 0.9), "hold": Choice((0.0, 0.625))},
        no_images,
    )
    control = Control("small images throughout, validated at full size", _small_throughout)
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0, "scale": 1.0}

    def __init__(
        self,
        scale: Annotated[Scale, Alias("initial_scale")] = 0.5,
        *,
        until: Annotated[float, Fraction()] = 0.8,
        hold: Annotated[float, Fraction()] = 0.625,
        multiple_of: Annotated[int, Count(), Alias("size_increment")] = 4,
        keys: ImageKeys = None,
    ) -> None:
        super().__init__(multiple_of=multiple_of, keys=keys)
        self.scale = scale
        self.until = until
        self.hold = hold

    @property
    def constant(self) -> bool:
        """Whether images have one size throughout."""
        return self.until == self.hold == 1.0

    @property
    @override
    def changes_shapes(self) -> bool:
        return not (self.neutral or self.constant)

    @override
    def share_of(self, u: float) -> float:
        return share_at(u, scale=self.scale, until=self.until, hold=self.hold)

    @override
    def shares(self) -> Iterable[float]:
        if self.hold == 1.0:
            return [self.scale]
        return [self.scale + (1.0 - self.scale) * i / _STEPS for i in range(_STEPS)]
