"""Progressive stacking: train a prefix of the blocks, and let it grow by copies of itself (Gong et al. 2019)."""

from collections.abc import Sequence
from typing import ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._sizes.stages import checked_stages, doubling
from lightning_eff.model.growth._stacking import Stacking


def source_of(block: int, *, count: int) -> int:
    """The block ``j mod L`` that a new block ``j >= L`` copies, where ``L = count`` blocks run so far."""
    return block % count


def _small_models(technique: "ProgressiveStacking") -> dict[str, Callback]:
    """The model of each stage but the last, throughout."""
    return {
        f"{count} block{'s' * (count > 1)} throughout": ProgressiveStacking(
            stages=[(0.0, count)], layers=technique.layers
        )
        for _, count in technique.stages[:-1]
    }


class ProgressiveStacking(Stacking):
    """Train the first few blocks of a deep network, and add copies of them as training goes on.

    From each fraction ``u`` of the budget on, ``count`` blocks run. When ``L`` blocks grow to more, each new block
    ``j`` starts as a copy of block ``j mod L``. The module is built at its full depth and keeps it: blocks that do not
    run yet cost no compute, no activation memory, no gradient and no optimizer state, every checkpoint has the plain
    module's names, and validation, test and prediction under this callback run the blocks that training has reached.

    A run that ends before all blocks run (an early stop, a last stage below the depth), and a checkpoint of before then,
    hold blocks that were never trained: loaded without this callback, the module is another one than was evaluated. It is
    warned of, and the checkpoint says it. ``finish="identity"`` mends it: on the first batch the waiting blocks are made
    to hand their input on, as above, so that at any moment, in every checkpoint and however the run ends, the plain
    module computes what was trained. Training is the same bit for bit, since a block is a copy of another when it
    begins to run. It costs three forward passes on the first batch.

    ``init="stack"`` copies whole blocks, which changes the network's function at the switch, and usually lifts the loss
    for a while. ``init="identity"`` also zeroes what must be zero of the copy (of a pre-norm block, its output
    projections) for the new block to hand its input on, so the function is kept. Whether the blocks can do that is
    tried on the first batch; it costs one extra forward pass there and at each switch.

    Growth happens between optimizer steps, never within an accumulation window. Under manual optimization it happens
    between batches.

    Logged: ``layers_active``, how many blocks run, and ``layers_fraction``, their share of all.

    Args:
        stages: pairs (fraction of the budget in [0, 1), number of blocks >= 1), both growing; the first fraction is 0.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.
        copy_optimizer_state: give a new block the optimizer state of the block that it copies (Adam's moments and
            step); otherwise, and for what ``init="identity"`` zeroes, the state starts anew. Where it cannot be found
            out whether the optimizer keeps state by parameter (it wraps another, or needs a closure), what is there is
            copied.
        init: "stack" copies the blocks, "identity" makes the copies preserve the function.
        finish: what becomes of blocks that training never reaches: None leaves them at their first weights,
            "identity" lets the plain module be right without them.

    Raises:
        ValueError: if the stages do not start at 0, shrink, or are malformed, or ``init`` or ``finish`` is none of
            its values; at setup, if the module has fewer blocks, blocks of different make or within a compiled module,
            or an optimizer without state to copy; on the first batch, if the blocks cannot be the identity.

    Sources:
        Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking"; Du et al. 2024, arXiv:2405.15319.
    """

    saves: ClassVar[str] = "compute, activation and optimizer memory of the blocks that do not run yet"
    paper: ClassVar[str] = "Gong et al. 2019 (ICML); Du et al. 2024, arXiv:2405.15319"
    constraints: ClassVar[str] = (
        "blocks of one class and shape; stacking lifts the loss at a switch; init='identity' needs pre-norm residual"
        " blocks and automatic optimization"
    )
    survey: ClassVar[Survey | None] = Survey("progressive stacking", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "first": Choice((0.25, 0.5)),  # of all blocks
            "until": Uniform(0.1, 0.7),
            "init": Choice(("stack", "identity")),
            "copy_optimizer_state": Choice((True, False)),
        },
        needs_blocks,
        doubling,
    )
    control: ClassVar[Control] = Control(
        "the small model throughout, at every number of blocks of the stages but the last", _small_models
    )

    finishes: ClassVar[bool] = True

    def __init__(
        self,
        stages: Sequence[tuple[float, int]] = ((0.0, 3), (0.25, 6), (0.5, 12)),
        *,
        layers: str | Sequence[str] | None = None,
        copy_optimizer_state: bool = True,
        init: str = "stack",
        finish: str | None = None,
    ) -> None:
        if init not in ("stack", "identity"):
            raise ValueError(
                f"ProgressiveStacking(init={init!r}): expected 'stack', which copies blocks, or 'identity', whose"
                " copies preserve the function."
            )
        if finish not in (None, "identity"):
            raise ValueError(
                f"ProgressiveStacking(finish={finish!r}): expected None, which leaves blocks that training never reaches"
                " as they are, or 'identity', which lets them hand their input on, so that the plain module is right."
            )
        self.stages = checked_stages(stages)
        self.layers = layers
        self.copy_optimizer_state = copy_optimizer_state
        self.init = init
        self.finish = finish
        self._reset()

    @override
    def source(self, block: int, count: int) -> int:
        return source_of(block, count=count)
