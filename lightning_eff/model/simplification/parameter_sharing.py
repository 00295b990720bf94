"""ParameterSharing: blocks that share the parameters of one (Lan et al. 2019).

With G groups of L / G consecutive blocks, block l (from 0) uses the parameters of block ``(L / G) floor(l G / L)``.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count, Layers, Names
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.blocks import find_stack, signature
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.technique import Control

WHO = "ParameterSharing"
_APART = "it trains, copies or freezes blocks separately, which share their parameters here"
_SCALES = "it sets or scales the weights of each block separately, and they are the same tensors here"
_SHARED = "it is not tested with parameters that blocks in several places share"


def first_of_group(index: int, length: int, groups: int) -> int:
    """Return the block whose parameters block ``index`` uses, if ``length`` blocks form ``groups`` of equal size."""
    return index - index % (length // groups)


class ParameterSharing(Architecture):
    """Let all blocks of a stack, or groups of consecutive blocks, share the parameters of their first one.

    Each block still runs, with the same shapes and the same time, and its gradients add up in the shared parameters. Buffers,
    such as BatchNorm's statistics, stay separate.

    Use it if parameters, gradients and optimizer states fill the memory, or what ranks send limits the speed. They take 1 / n
    of the memory if n blocks share theirs. **It saves no time per step in one process**, and a model of fewer parameters is
    worse at the same depth, which ALBERT makes up for with width. Shared weights begin as those of the first block of each
    group, so a pretrained module computes something else.

    Optimizers hold each shared parameter once. A checkpoint has the names of all blocks, with one tensor in the file for those
    that share it. So it loads strictly into ``lightning_eff.apply(plain, ParameterSharing())``, and into the plain module,
    which then computes the same with separate parameters. ``lightning_eff.export`` gives such a plain module. It logs
    ``removed``, the number of parameters.

    Args:
        groups: the number of groups of consecutive blocks, which divides the number of blocks. 1 shares across all blocks.
        names: the parameters of a block that are shared: dotted paths within the block, their last parts, or patterns, such as
            ``["attn.*"]``. None shares all, ``[]`` is plain training.
        layers: the stack of blocks: a dotted path, a pattern or a list of dotted paths. None finds it.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if ``groups`` does not divide the number of blocks, every group
            has one block, the blocks differ in their parameters, or a name matches none of them.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ParameterSharing(groups=2)])

    References:
        Lan et al. 2019, "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations", arXiv:1909.11942.
    """

    saves = "the memory of parameters, gradients and optimizer states of all but one block, and their communication"
    paper = "Lan et al. 2019, arXiv:1909.11942"
    constraints = "equal blocks, trained from scratch; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({"groups": Choice((1, 2))}, needs_blocks)
    control = Control("the baseline for the same time, with parameters of its own in each block")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                *("ProgressiveStacking", "CompoundGrowth", "AutoProg", "DropIn", "GreedyLayerwise", "LayerFreezing"),
                "ShallowToDeep",
            ),
            _APART,
        ),
        **dict.fromkeys(("Fixup", "TFixup", "LSUV", "DataDrivenInit", "MetaInit"), _SCALES),
        **dict.fromkeys(
            ("UShapedSkips", "ValueResiduals"), "it gives some blocks parameters that the others do not have"
        ),
        **dict.fromkeys(("KFAC", "OptimizerOffload", "TrainLargeThenCompress"), _SHARED),
        "QuantizedBase": "it rounds the weights of each layer, and these belong to several layers",
    }
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        **dict.fromkeys(
            (Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE, Part.FLAT),
            "it divides blocks apart from each other, and they share parameters",
        ),
    }
    change_at = Change.FREEZE
    neutral_at: ClassVar[Mapping[str, Any]] = {"names": []}
    _removed = 0

    def __init__(
        self,
        groups: Annotated[int, Count()] = 1,
        *,
        names: Annotated[Sequence[str] | None, Names("dotted paths or patterns")] = None,
        layers: Layers | None = None,
    ) -> None:
        self.groups = groups
        self.names = None if names is None else list(names)
        self.layers = layers

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        apart = functools.partial(side_by_side, root, always=True, batch=surgeon.batch)
        stack = find_stack(root, self.layers, who=WHO, without=apart, named=True)
        blocks, paths = stack.blocks, [*stack.named_blocks]
        if len(blocks) % self.groups or self.groups == len(blocks):
            raise ValueError(
                f"{WHO}(groups={self.groups}): {stack} has {len(blocks)} blocks; expected a proper divisor of that. Use"
                " groups=1, or remove the callback."
            )
        odd = next((i for i, block in enumerate(blocks) if signature(block) != signature(blocks[0])), None)
        if odd is not None:
            raise ValueError(
                f"{WHO}: blocks 0 and {odd} of {stack} differ in the shapes of their parameters, so they cannot share them."
                " Name equal blocks with layers=, or remove the callback."
            )
        known = [name for name, _ in blocks[0].named_parameters()]
        check_met(self.names or (), known, who=WHO, what="parameters of a block", root=type(root).__name__)
        before = _count(root)
        for index, block in enumerate(blocks):
            first = blocks[first_of_group(index, len(blocks), self.groups)]
            if block is not first:
                self._share(surgeon, first, block, f"{paths[index]}.")
        self._removed = before - _count(root)
        if not self._removed:
            raise ValueError(f"{WHO}: the blocks of {stack} share these parameters already. Remove the callback.")
        rank_zero_info(f"{WHO}: {len(blocks)} blocks of {stack} share {self._removed:,} parameters less.")

    def _share(self, surgeon: Surgeon, first: nn.Module, block: nn.Module, prefix: str) -> None:
        parameters = dict(first.named_parameters(remove_duplicate=False))
        for name, p in list(block.named_parameters(remove_duplicate=False)):
            if p is parameters[name] or not (self.names is None or any(meets(name, n) for n in self.names)):
                continue
            path, _, key = name.rpartition(".")
            surgeon.share(block.get_submodule(path), key, parameters[name])
            surgeon.where.append(prefix + name)

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"removed": self._removed}

    @override
    def summary(self) -> str:
        return f"removed {self._removed:,} parameters" if self._removed else "the module shared them already"


def _count(root: nn.Module) -> int:
    return sum(p.numel() for p in root.parameters())
