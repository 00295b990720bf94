"""Greedy layer-wise training: the blocks are trained one after the other, the others frozen (Bengio et al. 2006)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import DIFFERS, Part, Reasons
from lightning_eff._core.search_space import SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._freezing import Freezing


def block_at(u: float, *, num_blocks: int, until: float) -> int | None:
    """The block ``floor(L u / until)``, from 0, that trains at ``u``; None from ``until`` on, when all do."""
    return None if u >= until - 1e-9 else min(int(num_blocks * u / until + 1e-9), num_blocks - 1)


class GreedyLayerwise(Freezing):
    """Train one block after the other, from the bottom, each for as long, and then all of them together.

    Up to ``until``, as a fraction ``u`` of the budget, one block of the ``L`` trains at a time, for ``until / L`` of the
    budget, and the others are frozen. The loss is the module's own, taken through the whole network: the blocks above
    hand the gradient down and take none, and the backward pass ends at the block that trains. What lies below the blocks
    (embeddings, a stem) trains with the first, and what lies behind them (a norm, the head) throughout; a tied embedding is
    trained as the head that it is. From ``until`` on all train, which is the paper's fine-tuning.

    A frozen block has no gradient, so no optimizer moves it, by momentum or decay, and it keeps no new state; blocks that
    have not trained yet have their first weights, so blocks with residual connections are best. Under DDP the module is
    wrapped anew at each change.

    Logged: ``block``, the one that trains, from 0, or -1 when all do, and ``parameters_frozen``, the share of the module's
    parameters that are.

    Args:
        until: the share of the budget in which blocks train one by one, in [0, 1]; 0 is plain training.
        layers: the blocks, as paths or patterns (``"block_*"``), of one stack or several, in the order in which they
            run; None takes all stacks of the class that most blocks are of.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there are no blocks, they are shared, or checkpointed
            with ``use_reentrant=True``; as it freezes, if nothing would be left to train.

    Sources:
        Bengio et al. 2006, "Greedy Layer-Wise Training of Deep Networks".
    """

    saves: ClassVar[str] = (
        "while blocks train one by one, about half a step's compute: the weights' gradients of all others, and the backward"
        " pass below; and the optimizer state of blocks that have not trained yet"
    )
    paper: ClassVar[str] = "Bengio et al. 2006 (NeurIPS)"
    constraints: ClassVar[str] = (
        "automatic optimization; blocks not checkpointed with use_reentrant=True; best with residual blocks"
    )
    refuses: ClassVar[Reasons] = dict.fromkeys((Part.SHARD, Part.TENSOR, Part.PIPELINE), DIFFERS)
    survey: ClassVar[Survey | None] = Survey("greedy layer-wise training", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"until": Uniform(0.1, 0.6)}, needs_blocks)
    control: ClassVar[Control] = Control("the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        "LayerFreezing": "both say which blocks take gradients",
        "FixRes": "both say what trains, and its last share of the run leaves the blocks alone that are still to be trained",
        **dict.fromkeys(
            ("MESA", "Lookahead"), "it takes in what trains, a batch sooner or later by the order in which they stand"
        ),
    }
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, until: float = 0.5, *, layers: str | Sequence[str] | None = None) -> None:
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"GreedyLayerwise(until={until}): expected a share of the budget in [0, 1], in which blocks train one by"
                " one. 0 is plain training; 1 never trains them together."
            )
        self.until = until
        self.layers = layers
        self._reset()

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0

    @override
    def plan(self, u: float, num_blocks: int) -> tuple[int, list[int]]:
        block = block_at(u, num_blocks=num_blocks, until=self.until)
        return (0, []) if block is None else (block, [i for i in range(num_blocks) if i != block])

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"block": self._plan[0] if self._plan[1] else -1, "parameters_frozen": self._share}

    @override
    def summary(self) -> str:
        now = f"block {self._plan[0]} trained" if self._plan[1] else "all trained"
        return f"{now} at the end, of {self._where}"
