"""Automated progressive learning: depth and resolution grow in stages that a search chooses (AutoProg, Li et al. 2022)."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Layers, Number
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._progressive.course import WHO, Progressive
from lightning_eff.model.growth._progressive.inputs import Kind
from lightning_eff.model.growth._progressive.search import rung
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth._sizes.length import Keys


def _smallest(depth: float, num_blocks: int) -> int:
    return rung(num_blocks, depth)


def _fixed(technique: "AutoProg") -> Mapping[str, Callback]:
    """Make the control runs: the same stages on a fixed schedule, and the smallest depth throughout."""
    if technique.neutral:
        return {}
    kept = functools.partial(_smallest, technique.depth)
    arms: dict[str, Callback] = {"the smallest depth throughout": Shallower(kept=kept, layers=technique.layers)}
    if technique.search:
        arms = {"the same stages without a search": technique.like(search=0.0), **arms}
    return arms


def _from_profile(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Make the technique; search resolutions only where images are large enough to shrink."""
    large = profile.image_side is not None and profile.image_side >= 16
    return cls(**values, resolution=0.5 if large else 1.0)


class AutoProg(Progressive):
    """Grow the depth and the input resolution of a network in stages, each chosen by a short search during training.

    The stages begin at equal distances from 0 to ``until``. The last stage trains the whole network on full inputs.
    Every other stage begins with a search: the network grows to the largest candidate, and each optimizer step trains a
    sub-network of a random depth and resolution. In the second half of the search, the callback evaluates the loss
    ``L`` of every candidate on the current batch, with a moving average of the weights. The candidate with the lowest
    ``L T^alpha`` trains to the end of the stage, with the weights it has by then. ``T`` is the predicted time, blocks
    times pixels or tokens, so a resumed run decides alike. Ranks decide together, by their mean losses.

    Use it where compute is short and the number of stages and their sizes are unknown. With known stages,
    :class:`ProgressiveStacking` or :class:`CompoundGrowth` is simpler. Searches take the fraction ``search`` of the
    budget, and until the last stage the moving average costs one more copy of the weights, also in checkpoints. The
    loss rises for a while when the network grows.

    Candidate depths are ``num_stages`` steps from ``depth`` to all blocks, and resolutions likewise. The first search
    compares the smallest, the middle and the largest of both, in the module as it was made. Later searches compare up
    to three depths, from the next one on, and two resolutions, from the current one on.

    A new block is placed behind the block that it copies and starts from the moving average of its weights (momentum
    growth). Existing blocks keep their weights and optimizer state and move up. The module is built at its full depth
    and keeps it. Blocks that do not run cost no compute, have no gradient and no optimizer state, and every checkpoint
    has the plain module's names. The authors' code also starts existing blocks from the average.

    For batches of images (N, C, H, W), resolution means height and width, as in :class:`ProgressiveResizing`. Every
    size is tried on the first batch, and validation uses full images. For other batches only the depth is searched,
    unless ``inputs="sequences"`` allows sequences to be truncated.

    If a run ends before all blocks run, the module computes something else without this callback. A warning and a note
    in the checkpoint say so.

    Logged: ``depth`` and ``resolution``, the fractions of the last step; ``searching``, 1 during a search; ``alpha``,
    the last one found, 0 before; ``search_steps``, the optimizer steps spent in searches; ``search_passes``, the
    forward passes of evaluations.

    Args:
        num_stages: the number of stages. 4 is the paper's.
        depth: the smallest fraction of the blocks. At 1 with ``resolution=1`` it is plain training.
        resolution: the smallest fraction of height and width, or of a sequence's length.
        until: the fraction of the budget at which the last stage begins.
        search: the fraction of the budget that all searches take together, below ``until``. At 0 there is no search,
            and both sizes grow by one step per stage, as in the paper's manual schedule.
        alpha: the weight of time against loss. None finds it in each search, as the slope by which losses fall with
            time on a logarithmic scale. A search that compares fewer than three times reuses the previous value.
        half_life: the half-life of the moving average, as a fraction of the budget. The paper's decay of 0.9996 per
            step is 0.014 of its runs.
        inputs: the kind of inputs whose resolution grows. "auto" takes images where there are any.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.
        copy_optimizer_state: whether a new block copies the optimizer state of its source. Otherwise it starts empty.
        multiple_of: the number of pixels of which reduced sides are multiples. They are also multiples of the patch
            size.
        keys: the names or positions of the image or sequence tensors, where shapes do not tell.

    Raises:
        ValueError: for a value out of range. At setup, if there are too few blocks, or they differ or lie within a
            compiled module. On the first batch, before any weight has changed, if the inputs are not of the kind
            ``inputs``, or the module cannot run on smaller ones.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[AutoProg(num_stages=4, depth=0.5)])

    References:
        Li et al. 2022, "Automated Progressive Learning for Efficient Training of Vision Transformers",
        arXiv:2203.14509.
    """

    saves = (
        "compute, activation memory and optimizer memory of blocks that do not run yet; compute and activation memory of"
        " smaller inputs"
    )
    paper = "Li et al. 2022 (CVPR), arXiv:2203.14509"
    constraints = (
        "blocks of one class and shape; one more copy of the weights until the last stage; images for resolutions; the loss"
        " rises when the network grows; automatic optimization"
    )
    search_space = SearchSpace(
        {"depth": Choice((0.25, 0.5)), "until": Uniform(0.3, 0.8), "search": Uniform(0.03, 0.12)},
        needs_blocks,
        _from_profile,
    )
    control = Control("the same stages without a search, and the smallest depth throughout", _fixed)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "DropIn", "Shallower"),
            "both set how many blocks run",
        ),
        **dict.fromkeys(
            ("ProgressiveResizing", "EfficientTrain", "FixRes", "SequenceLengthWarmup"),
            "both set the size of the inputs",
        ),
        **dict.fromkeys(("LayerFreezing", "GreedyLayerwise"), "new blocks are inserted between frozen ones"),
    }

    def __init__(
        self,
        num_stages: Annotated[int, Count(at_least=2)] = 4,
        *,
        depth: Annotated[float, Fraction(above=0)] = 0.5,
        resolution: Annotated[float, Fraction(above=0)] = 0.5,
        until: Annotated[float, Fraction(above=0, below=1)] = 0.75,
        search: Annotated[float, Fraction(below=1)] = 0.06,
        alpha: Annotated[float, Number(at_least=0)] | None = None,
        half_life: Annotated[float, Number(above=0)] = 0.014,
        inputs: Kind = "auto",
        layers: Layers | None = None,
        copy_optimizer_state: bool = True,
        multiple_of: Annotated[int, Count()] = 4,
        keys: Keys | None = None,
    ) -> None:
        if search >= until:
            raise ValueError(
                f"{WHO}(search={search}, until={until}): search must be below until, since searches are part of the stages"
                f" before it. Use search={until / 10:g}."
            )
        if depth == 1.0 and resolution < 1.0:
            raise ValueError(
                f"{WHO}({depth=}, {resolution=}): depth must be below 1, because the search always covers it. To grow the"
                f" resolution alone, use ProgressiveResizing."
            )
        self.num_stages = num_stages
        self.depth = depth
        self.resolution = resolution
        self.until = until
        self.search = search
        self.alpha = alpha
        self.half_life = half_life
        self.inputs: Kind = inputs
        self.layers = layers
        self.copy_optimizer_state = copy_optimizer_state
        self.multiple_of = multiple_of
        self.keys = keys

    def like(self, **other: Any) -> "AutoProg":
        """Return a copy of this technique with the settings ``other`` changed."""
        names = ("num_stages", "depth", "resolution", "until", "search", "alpha", "half_life", "inputs", "layers")
        names += ("copy_optimizer_state", "multiple_of", "keys")
        return AutoProg(**{**{name: getattr(self, name) for name in names}, **other})

    @property
    @override
    def neutral(self) -> bool:
        return self.depth == 1.0 and self.resolution == 1.0

    @property
    @override
    def changes_shapes(self) -> bool:
        return self.resolution < 1.0
