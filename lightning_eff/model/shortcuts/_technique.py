"""The base of techniques that connect blocks past those between them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count, Each
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core.search_space import SearchSpace, needs_blocks
from lightning_eff._core.technique import Control

#: Indices of blocks; None is all that can have the connection, and an empty list is plain training.
Blocks = Annotated[Sequence[int] | None, Each(Count(at_least=0), empty=True)]

_DEPTH = "it runs some of the blocks, and later blocks use tensors of each"
_FROZEN = "it ends the backward pass before the last blocks that it freezes, and connections lead past there"
_TOKENS = "blocks get fewer tokens there than earlier tensors of the pass have"
#: Techniques that leave blocks out, or add some during the run.
DEPTH = (
    *("StochasticDepth", "ProgressiveLayerDropping", "DropIn", "ProgressiveStacking", "AutoProg"),
    *("ShallowToDeep", "CompoundGrowth", "ResIST"),
)
#: For ``conflicts``: techniques that change which blocks or tokens a pass has.
CONFLICTS: Mapping[str, str] = {
    **dict.fromkeys(DEPTH, _DEPTH),
    **dict.fromkeys(("LayerFreezing", "GreedyLayerwise"), _FROZEN),
    **dict.fromkeys(
        ("RandomLTD", "TokenDropping", "PatchDropout", "PartialTokenTraining", "MaskGuidedTokens"), _TOKENS
    ),
    "TokenMerging": _TOKENS,
    "ManifoldMixup": "it mixes samples at one block, and tensors from before it are not mixed",
}


class Shortcuts(Architecture):
    """A technique whose blocks use tensors that earlier blocks of the same pass got, computed or returned.

    Attributes:
        layers: the stack of blocks.
    """

    change_at = Change.ADAPT
    control = Control("the baseline for the same time with its learning rate decayed to zero")
    search_space = SearchSpace({}, needs_blocks)
    conflicts: ClassVar[Mapping[str, str]] = CONFLICTS
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        Part.SHARD: UNTRIED,
        Part.TENSOR: UNTRIED,
        Part.ITSELF: UNTRIED,
        Part.PIPELINE: "blocks use tensors of earlier blocks, which another process may have",
    }
    layers: Any
    _count = 0

    def chosen(self, blocks: Sequence[int] | None, possible: Sequence[int]) -> list[int]:
        """Return the indices of the blocks to connect.

        Raises:
            ValueError: for an index of none of ``possible``.
        """
        found = [*possible] if blocks is None else sorted(set(blocks))
        wrong = [i for i in found if i not in possible]
        if wrong:
            raise ValueError(
                f"{type(self).__name__}(blocks={list(blocks or ())}): block {wrong[0]} cannot have the connection; expected"
                f" indices from {possible[0]} to {possible[-1]}. Leave it out."
            )
        return found

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"connections": self._count}

    @override
    def summary(self) -> str:
        return f"trained {self._count} connections" if self._count else "the module already had its connections"
