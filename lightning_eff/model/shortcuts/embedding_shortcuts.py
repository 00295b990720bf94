"""EmbeddingShortcuts: give each block the embedding beside its input (Jordan et al. 2024, modded-nanogpt).

The rule is ``x <- lambda_0 x + lambda_1 x_0`` for the input x of each block and the input x_0 of the first block. Each block
has its own lambda, initially (1, 0).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Layers
from lightning_eff.model.shortcuts._carried import Carried
from lightning_eff.model.shortcuts._fed import Feed, chain, feed_blocks, weights
from lightning_eff.model.shortcuts._technique import Blocks, Shortcuts

WHO = "EmbeddingShortcuts"
LAMBDAS = "shortcut_lambdas"


class FromEmbedding(Feed):
    """A block's part in the rule.

    Args:
        carried: the pass's x_0, shared by all blocks.
        gives: whether this is the first block, whose input is x_0.
        takes: whether the block has the shortcut.
        last: whether no later block has it.
    """

    turn = 1  # after skips: x_0 joins the sum of both

    def __init__(self, carried: Carried, *, gives: bool, takes: bool, last: bool) -> None:
        self.carried, self.gives, self.takes, self.last = carried, gives, takes, last

    @override
    def enter(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if self.gives:
            self.carried.begin()
            self.carried.put(0, hidden)
        if not self.takes:
            return hidden
        # x <- lambda_0 x + lambda_1 x_0
        lambdas = weights(block, LAMBDAS)
        return lambdas[0] * hidden + lambdas[1] * self.carried.get(0, hidden, lambdas, last=self.last)


class EmbeddingShortcuts(Shortcuts):
    """Add the embedding, times a learned number, to the input of each block, whose own input has a learned factor too.

    Later blocks need not carry the token's identity through the residual stream. The embedding x_0 is what the first block
    gets: token and position embeddings with their norm or dropout, if the module applies those before its blocks. Blocks are
    found by their structure, and a pass at setup verifies that each runs once on the output of the one before.

    Use it to pretrain transformers and other residual stacks. At first the module computes the same as before, bit for bit. It
    costs two products of a number with the hidden state per block. The two numbers per block have no weight decay. **It changes
    the model**: checkpoints load into ``lightning_eff.apply(plain, EmbeddingShortcuts(...))``, and ``export`` refuses. It logs
    ``connections``, the number of blocks with a shortcut.

    Args:
        blocks: the indices of blocks that get the embedding. None is all of them, ``[]`` is plain training.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no stack of blocks is found, its blocks do not run
            once each on the output of the one before, or no pass shows whether they do. In a step, if the number of tokens
            changes between blocks, or blocks are recomputed with ``use_reentrant=True``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[EmbeddingShortcuts()])

    References:
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt (records from November 2024 on).
    """

    saves = "steps: later blocks see the embedding directly; costs two products per block"
    paper = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt"
    constraints = "stacks of blocks that each run once per pass on the output of the one before"
    stays = "a plain block has no place for the embedding"
    neutral_at: ClassVar[Mapping[str, Any]] = {"blocks": ()}

    def __init__(self, blocks: Blocks = None, *, layers: Layers | None = None) -> None:
        self.blocks: Sequence[int] | None = blocks
        self.layers = layers

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = chain(surgeon, self.layers, who=WHO)
        takes = self.chosen(self.blocks, range(found.length))
        carried = Carried(WHO)
        feeds: dict[int, tuple[Feed, dict[str, float | list[float]]]] = {}
        for i in sorted({0, *takes}):
            feed = FromEmbedding(carried, gives=i == 0, takes=i in takes, last=i == takes[-1])
            feeds[i] = feed, ({LAMBDAS: [1.0, 0.0]} if i in takes else {})
        feed_blocks(surgeon, found, feeds)
        self._count = len(takes)
        rank_zero_info(f"{WHO}: {self._count} blocks of {found} get the embedding too.")
