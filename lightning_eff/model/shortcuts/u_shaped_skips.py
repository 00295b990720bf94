"""UShapedSkips: give each block of the second half the output of its mirror image (Jordan et al. 2024, modded-nanogpt).

The rule is ``x_j <- x_j + w_j y_i`` for the input x_j of block j in the second half of n blocks and the output y_i of block
``i = n - 1 - j``. Each pair has its own w, initially 1 as in the source, or ``init``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Count, Layers, Number
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff.model.shortcuts._carried import Carried
from lightning_eff.model.shortcuts._fed import Feed, chain, feed_blocks, weights
from lightning_eff.model.shortcuts._technique import Shortcuts

WHO = "UShapedSkips"
WEIGHT = "skip_weight"


def pairs_of(blocks: int, pairs: int | None) -> list[tuple[int, int]]:
    """Return (i, n - 1 - i) for the outermost pairs of n blocks."""
    most = blocks // 2
    return [(i, blocks - 1 - i) for i in range(most if pairs is None else min(pairs, most))]


class Skip(Feed):
    """A block's part in the rule.

    Args:
        carried: the outputs of the first half's blocks, shared by all.
        index: i.
        first: whether this is the first block of the pass.
        takes: whether this is block j, which gets the output of block i. Block i gives it.
    """

    def __init__(self, carried: Carried, *, index: int, first: bool, takes: bool) -> None:
        self.carried, self.index, self.first, self.takes = carried, index, first, takes

    @override
    def enter(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if self.first:
            self.carried.begin()
        if not self.takes:
            return hidden
        # x_j <- x_j + w_j y_i
        weight = weights(block, WEIGHT)
        return hidden + weight * self.carried.get(self.index, hidden, weight, last=True)

    @override
    def leave(self, hidden: Tensor) -> None:
        if not self.takes:
            self.carried.put(self.index, hidden)


class UShapedSkips(Shortcuts):
    """Add the output of block i, times a learned number, to the input of block n - 1 - i, as in a U-Net.

    The last blocks then see what the first blocks computed. The middle block of an odd number has no partner. Blocks are found
    by their structure, and a pass at setup verifies that each runs once on the output of the one before.

    Use it to pretrain transformers and other residual stacks of one width. The source starts with ``init=1``, which changes
    the function: use ``init=0`` to train on from a pretrained module, which then first computes the same as before, bit for
    bit. It costs a product of a number with the hidden state per pair, and keeps the outputs of the first half until the second
    half has run, also in evaluation. The numbers have no weight decay. **It changes the model**: checkpoints load into
    ``lightning_eff.apply(plain, UShapedSkips(...))``, and ``export`` refuses. It logs ``connections``, the number of pairs.

    Args:
        pairs: the number of pairs, from the outermost inwards. None is all of them, 0 is plain training.
        init: the first w of each pair.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no stack of three or more blocks is found, its
            blocks do not run once each on the output of the one before, or no pass shows whether they do. In a step, if the
            number of tokens changes between blocks, the module changes a block's output in place, or blocks are recomputed
            with ``use_reentrant=True``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[UShapedSkips()])

    References:
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt (records from November 2024 on).
        Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation", arXiv:1505.04597.
    """

    saves = "steps: the last blocks see what the first ones computed; keeps their outputs meanwhile"
    paper = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt"
    constraints = "stacks of three or more blocks that each run once per pass on the output of the one before"
    search_space = SearchSpace({"init": Choice((0.0, 1.0))}, needs_blocks)
    stays = "a plain block has no place for the output of another one"
    neutral_at: ClassVar[Mapping[str, Any]] = {"pairs": 0}

    def __init__(
        self,
        pairs: Annotated[int | None, Count(at_least=0)] = None,
        *,
        init: Annotated[float, Number()] = 1.0,
        layers: Layers | None = None,
    ) -> None:
        self.pairs, self.init, self.layers = pairs, init, layers

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = chain(surgeon, self.layers, who=WHO, least=3)
        pairs = pairs_of(found.length, self.pairs)
        carried = Carried(WHO)
        feeds: dict[int, tuple[Feed, dict[str, float | list[float]]]] = {}
        for i, j in pairs:
            feeds[i] = Skip(carried, index=i, first=i == 0, takes=False), {}
            feeds[j] = Skip(carried, index=i, first=False, takes=True), {WEIGHT: self.init}
        feed_blocks(surgeon, found, feeds)
        self._count = len(pairs)
        first = f" They start at {self.init:g}, so the module first computes something else." if self.init else ""
        rank_zero_info(f"{WHO}: {self._count} skips between the blocks of {found}.{first}")
