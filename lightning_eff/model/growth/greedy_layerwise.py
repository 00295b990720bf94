"""Greedy layer-wise training: train one block at a time with the others frozen (Bengio et al. 2006)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Layers
from lightning_eff._core._needs.needs import DIFFERS, Part, Reasons
from lightning_eff._core.search_space import SearchSpace, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._freezing import Freezing


def block_at(u: float, *, num_blocks: int, until: float) -> int | None:
    """Return the block ``floor(L u / until)``, from 0, that trains at ``u``; None from ``until`` on, when all train."""
    return None if u >= until - 1e-9 else min(int(num_blocks * u / until + 1e-9), num_blocks - 1)


class GreedyLayerwise(Freezing):
    """Train one block at a time, from the bottom up, and then all blocks together.

    Until the fraction ``until`` of the budget, one of the ``L`` blocks trains at a time, each for ``until / L`` of the
    budget. The other blocks are frozen. The loss is the module's own, computed through the whole network: the gradient
    passes through the blocks above, and the backward pass ends at the block that trains. Layers before the blocks
    (embeddings, a stem) train with the first block, and layers behind them (a norm, the head) train throughout. A tied
    embedding keeps training as part of the head. From ``until`` on everything trains, which is the paper's fine-tuning.

    It saves about half of a step's compute while blocks train one by one, and the optimizer state of blocks that have
    not trained yet. Each block trains for less time, so compare it with the baseline at equal time.

    A frozen block has no gradient, so no optimizer changes it by momentum or weight decay. Blocks that have not trained
    yet keep their initial weights, so residual blocks work best. Under DDP the module is wrapped again at each change.

    Logged: ``block``, the one that trains, from 0, or -1 when all do; ``parameters_frozen``, the frozen fraction of the
    parameters.

    Args:
        until: the fraction of the budget during which blocks train one by one. 0 is plain training, and 1 never trains
            them together.
        layers: the blocks, as dotted paths or patterns (``"block_*"``), of one stack or several, in the
            order in which they run. None takes all stacks of the most frequent block class.

    Raises:
        ValueError: for a value out of range. At setup, if there are no blocks, they are shared, or checkpointed with
            ``use_reentrant=True``. When it freezes blocks, if no parameter would be left to train.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[GreedyLayerwise(until=0.5)])

    References:
        Bengio et al. 2006, "Greedy Layer-Wise Training of Deep Networks", NeurIPS.
    """

    saves = (
        "about half of a step's compute while blocks train one by one (the weight gradients of all other blocks, and the"
        " backward pass below); the optimizer state of blocks that have not trained yet"
    )
    paper = "Bengio et al. 2006 (NeurIPS)"
    constraints = "automatic optimization; blocks not checkpointed with use_reentrant=True; best with residual blocks"
    refuses: ClassVar[Reasons] = dict.fromkeys((Part.SHARD, Part.TENSOR, Part.PIPELINE), DIFFERS)
    search_space = SearchSpace({"until": Uniform(0.1, 0.6)}, needs_blocks)
    control = Control("the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        "LayerFreezing": "both set which blocks train",
        "FixRes": "both set what trains, and FixRes freezes the blocks in its last phase, before all of them have trained",
        **dict.fromkeys(
            ("MESA", "Lookahead"), "it averages what trains, so the result would depend on the order of the callbacks"
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0}

    def __init__(self, until: Annotated[float, Fraction()] = 0.5, *, layers: Layers | None = None) -> None:
        self.until = until
        self.layers = layers

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
