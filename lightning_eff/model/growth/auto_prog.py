"""Automated progressive learning: depth and resolution grow as a search on the way finds best (AutoProg, Li et al. 2022)."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._progressive.course import WHO, Progressive
from lightning_eff.model.growth._progressive.inputs import Inputs, Kind
from lightning_eff.model.growth._progressive.search import rung
from lightning_eff.model.growth._shallower import Shallower


def _smallest(depth: float, num_blocks: int) -> int:
    return rung(num_blocks, depth)


def _fixed(technique: "AutoProg") -> Mapping[str, Callback]:
    """The same stages by the clock, and the smallest depth throughout."""
    if technique.neutral:
        return {}
    kept = functools.partial(_smallest, technique.depth)
    arms: dict[str, Callback] = {"the smallest depth throughout": Shallower(kept=kept, layers=technique.layers)}
    if technique.search:
        arms = {"the same stages without a search": technique.like(search=0.0), **arms}
    return arms


def _from_profile(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Resolutions are searched where there are images to be made smaller."""
    large = profile.image_side is not None and profile.image_side >= 16
    return cls(**values, resolution=0.5 if large else 1.0)


class AutoProg(Progressive):
    """Train a network whose depth and resolution grow in stages, each chosen by a short search that is part of the training.

    The stages begin at equal distances from 0 to ``until``, and the last is of the whole network on full inputs. Each of the
    others begins with a search. The network grows to the largest candidate, and each optimizer step then trains a sub-network
    of it, of a depth and a resolution that are drawn. Half way and later, every candidate is evaluated by its loss ``L`` on
    the batch at hand, in forward passes with the moving average of the weights, and the one with the least ``L T^alpha``
    trains to the end of the stage, with the weights that it has by then. Its time ``T`` is predicted, as its number of blocks
    times that of its pixels or tokens, so that a resumed run decides alike. All ranks decide by the mean of their losses.

    Depths are ``num_stages`` steps from ``depth`` of the blocks to all, resolutions likewise. The first search is over the
    smallest, the middle and the largest of both, in the module as it was made; later ones are over up to three depths, from
    the next one on, and two resolutions, from the present one on.

    Growth is by interpolation: new blocks follow the block that they come from, and begin with the moving average of its
    weights (momentum growth); blocks that were there keep weights and optimizer state, and move up. The sub-network of a
    depth goes without the first of the new blocks. Sub-networks lie in the first blocks of the module, which is built at its
    full depth and keeps it: blocks that do not run have no compute, no gradient and no optimizer state, and every checkpoint
    has the plain module's names. The public code begins blocks that were there with the average, too.

    Where batches hold images (N, C, H, W), resolution is their height and width, as of :class:`ProgressiveResizing`, every
    size is tried on the first batch before any weight has changed, and validation sees full ones. Other batches are left
    as they are, which is said, and depth alone is searched; ``inputs="sequences"`` lets sequences be truncated.

    A run that ends before all blocks run leaves a module that is another one without this callback. It is warned of, and
    checkpoints say it. Until the last stage one more copy of the weights is held, and checkpoints hold it, too.

    Logged: ``depth`` and ``resolution``, the shares of the last step; ``searching``, 1 in a search; ``alpha``, as found last,
    0 before; ``search_steps``, how many optimizer steps were part of one; ``search_passes``, forward passes of evaluations.

    Args:
        num_stages: >= 2.
        depth: the smallest share of the blocks, in (0, 1]; at 1 with ``resolution=1`` it is plain training.
        resolution: the smallest share of height and width, or of a sequence's length, in (0, 1].
        until: the share of the budget at which the last stage begins, in (0, 1).
        search: the share of the budget that all searches take together, in [0, until). At 0 nothing is searched: in each
            stage both sizes are one step larger, as by the paper's manual schedule.
        alpha: how much time counts against loss, >= 0. None finds it in each search, as the slope by which losses fall with
            time, in logarithms; where less than three times are compared, it is that of the search before.
        half_life: of the moving average, a share of the budget > 0. The paper's 0.9996 a step is 0.014 of its runs.
        inputs: "auto", "images" or "sequences".
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.
        copy_optimizer_state: new blocks get the optimizer state of the block that they come from; otherwise theirs begins anew.
        multiple_of: pixels, >= 1; sides below the full ones are multiples of it, and of patches.
        keys: names or positions of the tensors that are images or sequences, where shapes do not tell.

    Raises:
        ValueError: if an argument is out of its range; at setup, if blocks are too few, of different make or within a
            compiled module; on the first batch, before any weight has changed, if there are no inputs as ``inputs`` says, or
            the module cannot do with smaller ones.

    Sources:
        Li et al. 2022, "Automated Progressive Learning for Efficient Training of Vision Transformers", arXiv:2203.14509.
    """

    saves: ClassVar[str] = "compute, activation and optimizer memory of blocks that do not run yet, and of pixels"
    paper: ClassVar[str] = "Li et al. 2022 (CVPR), arXiv:2203.14509"
    constraints: ClassVar[str] = (
        "blocks of one class and shape; one more copy of the weights until the last stage; images for resolutions; growth"
        " lifts the loss; automatic optimization"
    )
    survey: ClassVar[Survey | None] = Survey("AutoProg", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"depth": Choice((0.25, 0.5)), "until": Uniform(0.3, 0.8), "search": Uniform(0.03, 0.12)},
        needs_blocks,
        _from_profile,
    )
    control: ClassVar[Control] = Control("the same stages without a search, and the smallest depth throughout", _fixed)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "DropIn", "Shallower"),
            "both say how many blocks the network has",
        ),
        **dict.fromkeys(
            ("ProgressiveResizing", "EfficientTrain", "FixRes", "SequenceLengthWarmup"), "both say how large inputs are"
        ),
        **dict.fromkeys(
            ("LayerFreezing", "GreedyLayerwise"), "new blocks come between those of which it says that they are frozen"
        ),
    }

    def __init__(
        self,
        num_stages: int = 4,
        *,
        depth: float = 0.5,
        resolution: float = 0.5,
        until: float = 0.75,
        search: float = 0.06,
        alpha: float | None = None,
        half_life: float = 0.014,
        inputs: Kind = "auto",
        layers: str | Sequence[str] | None = None,
        copy_optimizer_state: bool = True,
        multiple_of: int = 4,
        keys: list[str | int] | None = None,
    ) -> None:
        def number(name: str, value: Any, low: float, high: float, text: str) -> None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{WHO}({name}={value!r}): expected {text}.")

        above = math.ulp(0.0)
        if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 2:
            raise ValueError(f"{WHO}(num_stages={num_stages!r}): expected an integer >= 2. The paper's is 4.")
        number("depth", depth, above, 1.0, "the smallest share of the blocks, in (0, 1]")
        number("resolution", resolution, above, 1.0, "the smallest share of the full resolution, in (0, 1]")
        number(
            "until", until, above, math.nextafter(1.0, 0.0), "the share of the budget before the last stage, in (0, 1)"
        )
        number(
            "search", search, 0.0, math.nextafter(until, 0.0), f"a share of the budget in [0, until), of until={until}"
        )
        if alpha is not None:
            number("alpha", alpha, 0.0, math.inf, "a finite exponent of time >= 0, or None to find it")
        number("half_life", half_life, above, math.inf, "a share of the budget > 0")
        if depth == 1.0 and resolution < 1.0:
            raise ValueError(
                f"{WHO}({depth=}, {resolution=}): expected a depth below 1, since depth is what is searched in any case. Use"
                " ProgressiveResizing where resolution alone is to grow."
            )
        Inputs(kind=inputs, multiple_of=multiple_of, keys=keys, who=WHO)
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
        self._reset()

    def like(self, **other: Any) -> "AutoProg":
        """One with these settings, but for ``other``."""
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
