"""Progressive resizing: train on small images first (Howard 2018; Tan & Le 2021, EfficientNetV2; as Composer does it)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._resolution import SmallerImages, check_share, no_images

WHO = "ProgressiveResizing"
_STEPS = 4096  # points of the ramp that are looked at for its sizes: more than images have pixels


def share_at(u: float, *, scale: float, until: float, hold: float) -> float:
    """The share of the full side at the share ``u`` of the budget.

    ``scale`` for ``u < hold until``, then ``scale + (1 - scale) (u - hold until) / (until - hold until)``, and 1 from
    ``until`` on.
    """
    if u >= until:
        return 1.0
    start = hold * until
    return scale if u <= start else scale + (1.0 - scale) * (u - start) / (until - start)


def _small_throughout(technique: "ProgressiveResizing") -> Mapping[str, Callback]:
    """The size at which it starts, for the whole run."""
    if technique.neutral or technique.constant:
        return {}
    same = {"scale": technique.scale, "multiple_of": technique.multiple_of, "keys": technique.keys}
    return {f"{technique.scale:g} of the side throughout": ProgressiveResizing(**same, until=1.0, hold=1.0)}


class ProgressiveResizing(SmallerImages):
    """Train on images of ``scale`` times their height and width, then ever larger ones, and on full ones from ``until`` on.

    At the share ``u`` of the budget both sides are ``scale`` of the full ones while ``u < hold until``, grow linearly to
    ``until``, and are full from then on, when ``training_step`` gets the very batch that the loader made. With the defaults,
    which are Composer's, half of the budget is spent at half the side, and its last fifth at the full one. Sides are rounded
    to the nearest multiple of ``multiple_of`` (and of the patches into which a convolution cuts the images), and hold over an
    accumulation window. Validation, test and prediction see full images.

    Images are the 4-D tensors (N, C, H, W) of floating point in the batch, wherever they are, or those of uint8 where there
    are none; they shrink bilinearly without aliasing, in their own dtype and memory format. Other tensors (..., H, W), such
    as masks, take the nearest pixel. A target that is 4-D and of floating point is taken for an image unless ``keys`` says
    which are. What counts pixels in numbers would be wrong: boxes and keypoints must be shares of the side.

    Before any weight has changed, every size of the run is tried with two samples of the first batch, in forward passes that
    leave no trace. Transformers' models that can are asked to interpolate positions (``interpolate_pos_encoding``); a table
    with a row for each patch, that a module adds by itself, is found and interpolated, in the graph, so that it is trained
    at all sizes. What can neither is refused, as are flattened features.

    Regularisation should grow with the size (Tan & Le 2021): add it in the module or the data set where it matters. Loaders
    deliver full images all along, so at small sizes they may be what a step waits for; each new size recompiles a compiled
    module.

    Where only full images tell the answer (``benchmarks/rings``: half of the side hardly shows what tells) it lost: after
    half a minute of one CPU thread it was far behind plain training, all of whose steps are full ones, though ahead of small
    images throughout (docs/evidence.md). Expect gains where small images teach most of the task.

    Logged: ``side``, the height of the last step's images in pixels, and ``share``, its share of the full one.

    Args:
        scale: share of the full height and width at the start, in (0, 1]; 1 is plain training.
        until: share of the budget in [0, 1] from which on images are full; 0 is plain training.
        hold: share of ``until`` in [0, 1] for which images stay at ``scale``; at 1 they are full at once from then on.
        multiple_of: pixels, >= 1; sides below the full ones are multiples of it.
        keys: names (dict, dataclass) or positions (tuple, list) of the tensors (N, C, H, W) that are images, where looking at
            shapes does not tell.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, before any weight has changed, if it holds no
            images, none would be smaller, or the module cannot do with images of some size of the run.

    Sources:
        Howard 2018 (fast.ai, DAWNBench); Tan & Le 2021, arXiv:2104.00298; MosaicML's Composer (the schedule).
    """

    saves: ClassVar[str] = "compute and activations early in training: at half the side a CNN's step costs a quarter"
    paper: ClassVar[str] = "Howard 2018; Tan & Le 2021, arXiv:2104.00298"
    constraints: ClassVar[str] = (
        "automatic optimization; batches with images (N, C, H, W); modules for images of any size: CNNs with global pooling,"
        " ViTs whose positions can be interpolated; every new size recompiles a compiled module"
    )
    survey: ClassVar[Survey | None] = Survey("progressive resizing", zhuang="2.1", shen="3.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"scale": Choice((0.5, 0.625, 0.75)), "until": Uniform(0.3, 0.9), "hold": Choice((0.0, 0.625))},
        no_images,
    )
    control: ClassVar[Control] = Control("small images throughout, validated at full size", _small_throughout)
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        scale: float = 0.5,
        *,
        until: float = 0.8,
        hold: float = 0.625,
        multiple_of: int = 4,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        check_share(scale, who=WHO, name="scale", of="a share of the full height and width; 1 is plain training")
        if scale == 0:
            raise ValueError(f"{WHO}({scale=}): expected a share of the full height and width above 0.")
        check_share(until, who=WHO, name="until", of="the share of the budget from which on images are full")
        check_share(hold, who=WHO, name="hold", of="the share of until for which images stay at scale")
        super().__init__(multiple_of=multiple_of, keys=keys)
        self.scale = scale
        self.until = until
        self.hold = hold

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0 or self.scale == 1.0

    @property
    def constant(self) -> bool:
        """Whether images are of one size throughout."""
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
