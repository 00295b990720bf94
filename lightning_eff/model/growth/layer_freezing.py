"""Layer freezing: the blocks at the bottom stop training one after the other (Composer's; Brock et al. 2017, FreezeOut)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._freezing import Freezing


def num_frozen(u: float, *, num_blocks: int, start: float, end: float, depth: float) -> int:
    """``min(floor(L * depth * (u - start) / (end - start)), L - 1)``, 0 before ``start`` and constant after ``end``."""
    share = min(max((u - start) / (end - start), 0.0), 1.0)
    return min(int(num_blocks * depth * share + 1e-9), num_blocks - 1)


class LayerFreezing(Freezing):
    """Freeze ever more blocks from the bottom up, as training goes on; their backward pass is not run any more.

    From ``start`` to ``end``, as fractions ``u`` of the budget, the number of frozen blocks grows linearly from 0 to
    ``depth * L`` of ``L``; the last block always trains. With each block freezes what lies below it, such as embeddings, a
    stem, or layers between the blocks; it is found in the first training step's graph. A tied embedding goes on training as
    the head that it is, too, and takes no gradient from below any more.

    Frozen parameters have no gradient, and so no optimizer moves them, by momentum or decay. The backward pass ends behind
    the last frozen block, and nothing of the frozen ones is kept for it: of a step with all but a few blocks frozen, little
    more than the forward pass is left. The frozen blocks still run forward as in training, with dropout; running statistics
    of BatchNorm go on. Under DDP the module is wrapped anew at each change, so gradients of frozen blocks are not
    communicated, ``static_graph`` or not.

    Logged: ``blocks_frozen``, and ``parameters_frozen``, the share of the module's parameters that are.

    Args:
        start: the share of the budget before which all blocks train, in [0, 1).
        end: the share from which on no more are frozen, in (start, 1].
        depth: the share of the blocks that are frozen in the end, in [0, 1]; 0 is plain training.
        layers: the blocks, as paths or patterns (``"block_*"``), of one stack or several, in the order in which they
            run; None takes all stacks of the class that most blocks are of.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there are no blocks, they are shared, or checkpointed
            with ``use_reentrant=True``; as it freezes, if nothing would be left to train.

    Sources:
        MosaicML's Composer, ``layer_freezing``; Brock et al. 2017, arXiv:1706.04983.
    """

    saves: ClassVar[str] = (
        "the backward pass, kept activations and communicated gradients of the frozen blocks: at start 0.5 and depth 1 about"
        " a sixth of a run's compute"
    )
    paper: ClassVar[str] = "MosaicML Composer, layer freezing; Brock et al. 2017, arXiv:1706.04983"
    constraints: ClassVar[str] = "automatic optimization; blocks not checkpointed with use_reentrant=True"
    survey: ClassVar[Survey | None] = Survey("layer freezing", zhuang="2.2", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"start": Uniform(0.3, 0.8), "depth": Uniform(0.3, 1.0)}, needs_blocks
    )
    control: ClassVar[Control] = Control("the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        "GreedyLayerwise": "both say which blocks take gradients",
    }
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        start: float = 0.5,
        *,
        end: float = 1.0,
        depth: float = 1.0,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not 0.0 <= start < 1.0:
            raise ValueError(
                f"LayerFreezing(start={start}): expected a share of the budget in [0, 1), before which all blocks train."
                " 0.5 is Composer's."
            )
        if not start < end <= 1.0:
            raise ValueError(
                f"LayerFreezing(start={start}, end={end}): expected end in ({start}, 1], the share of the budget by which"
                " the last block that is to be frozen is. 1 is Composer's."
            )
        if not 0.0 <= depth <= 1.0:
            raise ValueError(
                f"LayerFreezing(depth={depth}): expected a share of the blocks in [0, 1], those frozen in the end. 1 is"
                " Composer's; 0 is plain training."
            )
        self.start = start
        self.end = end
        self.depth = depth
        self.layers = layers
        self._reset()

    @property
    @override
    def neutral(self) -> bool:
        return self.depth == 0.0

    @override
    def plan(self, u: float, num_blocks: int) -> tuple[int, list[int]]:
        count = num_frozen(u, num_blocks=num_blocks, start=self.start, end=self.end, depth=self.depth)
        count = max(count, self._plan[0])  # progress by the clock may come back, and what is frozen stays so
        return count, list(range(count))

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"blocks_frozen": self._plan[0], "parameters_frozen": self._share}

    @override
    def summary(self) -> str:
        return f"{self._plan[0]} of {self._where} frozen at the end"
