"""Progressive stacking: train the first blocks, then grow the network by copies of them (Gong et al. 2019)."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Layers
from lightning_eff._core._arguments.stages import Stages
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._sizes.stages import doubling
from lightning_eff.model.growth._stacking import Stacking

_STAGES, _HINT = ((0.0, 3), (0.25, 6), (0.5, 12)), "The default is [(0.0, 3), (0.25, 6), (0.5, 12)]."


def source_of(block: int, *, count: int) -> int:
    """Return the block ``j mod L`` that a new block ``j >= L`` copies, where ``L = count`` blocks run so far."""
    return block % count


def _small_models(technique: "ProgressiveStacking") -> dict[str, Callback]:
    """Make the control runs: the model of each stage but the last, throughout."""
    return {
        f"{count} block{'s' * (count > 1)} throughout": ProgressiveStacking(
            stages=[(0.0, count)], layers=technique.layers
        )
        for _, count in technique.stages[:-1]
    }


class ProgressiveStacking(Stacking):
    """Train the first few blocks of a deep network, then add copies of them in stages until all blocks run.

    ``stages`` says how many blocks run from which fraction of the budget on. When ``L`` blocks grow to more, new block
    ``j`` starts as a copy of block ``j mod L``. The module is built at its full depth and keeps it. Blocks that do not
    run yet cost no compute, no activation memory, no gradient and no optimizer state. Every checkpoint has the plain
    module's names. Validation, test and prediction under this callback run the blocks that training has reached. Model
    summaries count the waiting blocks as trainable.

    Use it to pretrain deep transformers whose blocks have the same shape. The loss rises for a while at each switch.

    ``init="stack"`` copies whole blocks, which changes the function of the network at the switch. ``init="identity"``
    also zeroes the weights that must be zero for the new block to pass its input on unchanged (in a pre-norm block, its
    output projections), so the function is kept. The first batch checks whether the blocks can do this; it costs one
    extra forward pass there and at each switch.

    If a run ends before all blocks run (early stopping, or a last stage below the depth), the remaining blocks were
    never trained. Loaded without this callback, the module computes something else than was evaluated. A warning and a
    note in the checkpoint say so. ``finish="identity"`` avoids this: on the first batch the waiting blocks are made to
    pass their input on, so the plain module computes what was trained at any moment. Training itself stays the same bit
    for bit. It costs three forward passes on the first batch.

    The network grows between optimizer steps, never within an accumulation window; under manual optimization, between
    batches.

    Logged: ``layers_active``, the number of blocks that run, and ``layers_fraction``, their fraction of all.

    Args:
        stages: the pairs (fraction of the budget, number of blocks that run from there on).
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.
        copy_optimizer_state: whether a new block copies the optimizer state of its source (Adam's moments and step
            count). Otherwise, and for weights that ``init="identity"`` zeroes, the state starts empty. For an optimizer
            that wraps another one or needs a closure, whatever state is found is copied.
        init: the way a new block starts. "stack" copies a block, and "identity" keeps the function of the network.
        finish: what becomes of blocks that training never reaches. None leaves their initial weights, and "identity"
            makes the plain module right without them.

    Raises:
        ValueError: for a value out of range. At setup, if the module has fewer blocks than the stages, its blocks
            differ or lie within a compiled module, or the optimizer has no state to copy. On the first batch, if the
            blocks cannot be the identity.

    Example:
        >>> stages = [(0.0, 3), (0.25, 6), (0.5, 12)]
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ProgressiveStacking(stages, init="identity")])

    References:
        Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking", ICML; Du et al. 2024, "Stacking Your
        Transformers", arXiv:2405.15319.
    """

    paper = "Gong et al. 2019 (ICML); Du et al. 2024, arXiv:2405.15319"
    constraints = (
        "blocks of one class and shape; the loss rises at a switch; init='identity' needs pre-norm residual blocks and"
        " automatic optimization"
    )
    search_space = SearchSpace(
        {
            "first": Choice((0.25, 0.5)),  # of all blocks
            "until": Uniform(0.1, 0.7),
            "init": Choice(("stack", "identity")),
            "copy_optimizer_state": Choice((True, False)),
        },
        needs_blocks,
        doubling,
    )
    control = Control("the small model throughout, once for each stage but the last", _small_models)

    finishes: ClassVar[bool] = True

    def __init__(
        self,
        stages: Annotated[Sequence[tuple[float, int]], Stages("number of blocks", Count(), _HINT)] = _STAGES,
        *,
        layers: Layers | None = None,
        copy_optimizer_state: bool = True,
        init: Literal["stack", "identity"] = "stack",
        finish: Literal["identity"] | None = None,
    ) -> None:
        self.stages = list(stages)
        self.layers = layers
        self.copy_optimizer_state = copy_optimizer_state
        self.init = init
        self.finish = finish

    @override
    def source(self, block: int, count: int) -> int:
        return source_of(block, count=count)
