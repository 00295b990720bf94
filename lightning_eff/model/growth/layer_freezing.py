"""Layer freezing: stop training the lowest blocks, one after the other (Composer; FreezeOut, Brock et al. 2017)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Fraction, Layers
from lightning_eff._core.search_space import SearchSpace, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._freezing import Freezing


def num_frozen(u: float, *, num_blocks: int, start: float, end: float, depth: float) -> int:
    """``min(floor(L * depth * (u - start) / (end - start)), L - 1)``, 0 before ``start`` and constant after ``end``."""
    share = min(max((u - start) / (end - start), 0.0), 1.0)
    return min(int(num_blocks * depth * share + 1e-9), num_blocks - 1)


class LayerFreezing(Freezing):
    """Freeze more and more blocks from the bottom up, and skip their backward pass.

    From ``start`` to ``end``, as fractions of the budget, the number of frozen blocks grows linearly from 0 to
    ``depth * L`` of ``L``. The last block always trains. Layers below a frozen block (embeddings, a stem, layers
    between blocks) freeze with it; they are found in the graph of the first training step. A tied embedding keeps
    training as part of the head.

    Use it late in training, when the lower layers hardly change, or in fine-tuning. A step with most blocks frozen
    costs little more than its forward pass, because the backward pass ends behind the last frozen block and keeps no
    activations below it.

    Frozen parameters have no gradient, so no optimizer changes them by momentum or weight decay. Frozen blocks still
    run forward in training mode: dropout acts, and the running statistics of BatchNorm are updated. Under DDP the
    module is wrapped again at each change, so gradients of frozen blocks are not communicated, with or without
    ``static_graph``.

    Logged: ``blocks_frozen``, and ``parameters_frozen``, the frozen fraction of the parameters.

    Args:
        start: the fraction of the budget at which freezing begins. 0.5 is Composer's default. Also accepted as
            ``freeze_start``.
        end: the fraction of the budget at which freezing ends, above ``start``.
        depth: the fraction of the blocks that are frozen at the end. 0 is plain training. Also accepted as ``freeze_level``.
        layers: the blocks, as dotted paths or patterns (``"block_*"``), of one stack or several, in the
            order in which they run. None takes all stacks of the most frequent block class.

    Raises:
        ValueError: for a value out of range. At setup, if there are no blocks, they are shared, or checkpointed with
            ``use_reentrant=True``. When it freezes blocks, if no parameter would be left to train.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LayerFreezing(start=0.5, depth=0.8)])

    References:
        MosaicML's Composer, ``layer_freezing``; Brock et al. 2017, "FreezeOut: Accelerate Training by Progressively
        Freezing Layers", arXiv:1706.04983.
    """

    saves = (
        "the backward pass, kept activations and communicated gradients of the frozen blocks: about a sixth of a run's compute"
        " at start 0.5 and depth 1"
    )
    paper = "MosaicML Composer, layer freezing; Brock et al. 2017, arXiv:1706.04983"
    constraints = "automatic optimization; blocks not checkpointed with use_reentrant=True"
    search_space = SearchSpace({"start": Uniform(0.3, 0.8), "depth": Uniform(0.3, 1.0)}, needs_blocks)
    control = Control("the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        "GreedyLayerwise": "both set which blocks train",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"depth": 0.0}

    def __init__(
        self,
        start: Annotated[float, Fraction(below=1), Alias("freeze_start")] = 0.5,
        *,
        end: Annotated[float, Fraction(above=0)] = 1.0,
        depth: Annotated[float, Fraction(), Alias("freeze_level")] = 1.0,
        layers: Layers | None = None,
    ) -> None:
        if not start < end:
            raise ValueError(
                f"LayerFreezing(start={start}, end={end}): start must be below end. The defaults are 0.5 and 1."
            )
        self.start = start
        self.end = end
        self.depth = depth
        self.layers = layers

    @override
    def plan(self, u: float, num_blocks: int) -> tuple[int, list[int]]:
        count = num_frozen(u, num_blocks=num_blocks, start=self.start, end=self.end, depth=self.depth)
        count = max(count, self._plan[0])  # progress measured by the clock may go back, but frozen blocks stay frozen
        return count, list(range(count))

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"blocks_frozen": self._plan[0], "parameters_frozen": self._share}

    @override
    def summary(self) -> str:
        return f"{self._plan[0]} of {self._where} frozen at the end"
