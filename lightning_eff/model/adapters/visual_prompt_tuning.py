"""VisualPromptTuning: learnt tokens beside the patches of an image, with the whole network frozen (Jia et al. 2022).

The rule is ``[E_i, Z_i] = L_i([E_i-1, P_i])`` for block L_i, E the class token and patches, and P_i of (k, d), which alone
train; Z_i is let go (deep). Or ``[E_i, Z_i] = L_i([E_i-1, Z_i-1])`` from ``Z_0 = P`` on (shallow).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._needs.needs import Part
from lightning_eff._core.blocks import find_stack, hidden_of
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter
from lightning_eff.model.adapters._pieces import nowhere
from lightning_eff.model.adapters._prompts.block import prompted_block

WHO = "VisualPromptTuning"
_PATCHES = (nn.Conv2d, nn.Conv3d)
_DEPTH = "prompts enter at the first block and are let go behind the last, of which it passes over some; give deep=True"
_TOKENS = "prompts stand among the tokens of which it leaves out some; give deep=True"
_LONGER = (
    "the first block hands on k tokens more than it is handed, and stages have a place for as many; give deep=True"
)
#: What cannot train with shallow prompts alone.
SHALLOW: Mapping[str, str] = {
    **dict.fromkeys(("StochasticDepth", "ProgressiveLayerDropping", "DropIn", "ProgressiveStacking"), _DEPTH),
    **dict.fromkeys(("ShallowToDeep", "CompoundGrowth", "AutoProg"), _DEPTH),
    **dict.fromkeys(("PatchDropout", "PartialTokenTraining", "RandomLTD", "TokenDropping"), _TOKENS),
}


def first_prompts(length: int, d: int, patch: int) -> Tensor:
    """P of (k, d): uniform in +-sqrt(6 / (patch + d)), for patches of ``patch`` numbers, as the authors' code has it."""
    most = math.sqrt(6.0 / (patch + d))
    return torch.empty(length, d).uniform_(-most, most)


def _pointless(profile: RunProfile) -> str | None:
    if profile.image_side is None:
        return "samples are no images"
    return None if profile.memory_bound else "memory limits neither batch nor model, and all weights end better"


class VisualPromptTuning(Adapter):
    """Fine-tune a pretrained vision transformer by k tokens beside the patches: k d numbers, or as many in each block.

    ``deep`` gives each block prompts of its own and lets what it makes of them go; shallow ones enter at the first block and
    go through all. They stand behind the other tokens, and blocks see no places, so that where they stand makes no
    difference; what comes behind the stack sees the class token and patches alone. The stack is the longest of the module, or
    the one at ``layers``. That prompts work is tried at setup, on an input that is made up.

    The paper trains the head too: ``also=["classifier"]``, by the module's own name of it.

    Gradients and optimizer state are those of the prompts alone. A step costs what k tokens more cost, in evaluation too, and
    the backward pass goes through the whole network.

    Checkpoints hold what trains, and all buffers: a run resumes from one where the module's own code makes or loads the
    weights that the run began with, which is looked at. Without a Trainer load one with ``lightning_eff.apply(plain,
    VisualPromptTuning(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    ``HybridParallelStrategy`` divides what was put in with all else. Under Lightning's ``ModelParallelStrategy`` let
    ``configure_model`` call ``lightning_eff.apply(self, VisualPromptTuning(...))`` before it divides the module, and give
    the strategy ``save_distributed_checkpoint=False``, or the technique ``save="all"``.

    Logged: ``trained`` and ``frozen``, how many numbers, and ``prompts``, in all blocks.

    Args:
        length: k, an integer; 0 is plain training. The paper has 1 to 200.
        deep: prompts in each block, not at the first alone; better in the paper.
        layers: the blocks, as a path, a pattern or a list of paths; None looks for the longest.
        also: patterns of parameters, or modules, that train as a whole beside, such as a new head.
        save: "adapter" for checkpoints of what trains, "all" for whole ones.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no stack is found, its blocks are handed no tokens of
            an image, (B, T, d), or masks, tables and the like beside them, or take no more tokens, as with windows and
            relative places; under strategies that divide parameters otherwise; from a checkpoint without the frozen
            weights, where the module has others than its run began with.

    Sources:
        Jia et al. 2022, arXiv:2203.12119.
    """

    saves: ClassVar[str] = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper: ClassVar[str] = "Jia et al. 2022, arXiv:2203.12119"
    constraints: ClassVar[str] = "vision transformers whose blocks see no places; fine-tuning"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (visual prompts)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"length": Choice((5, 10, 50)), "deep": Choice((True, False))}, _pointless
    )
    control: ClassVar[Control] = Control("the baseline, which tunes all weights, for as many seconds")
    stays: ClassVar[str] = "its prompts are tokens that no image has, and no plain module has a place for them"
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters", "PromptTuning"), RIVALS),
        "GradientCentralization": "it centres the gradients of maps' weights, which are frozen here",
        "ReplaceOptimizer": "it steps hidden matrices, which are frozen here",
        **dict.fromkeys(
            ("GatedPositionalAttention", "Linformer"),
            "its attention is made for the patches' places, and prompts have none",
        ),
        "TokenMerging": "its attention counts what each token stands for, and prompts come in behind that count",
        "KFAC": "it preconditions the weights of maps, which are frozen here",
        "FixRes": "it ends by training the classifier and norms alone, which are frozen here",
        "GreedyLayerwise": "it trains some blocks at a time, whose prompts are all that trains here",
        "LayerFreezing": "it freezes blocks, whose prompts are all that trains here",
    }
    _prompts = 0

    def __init__(
        self,
        length: int = 10,
        *,
        deep: bool = True,
        layers: str | Sequence[str] | None = None,
        also: Sequence[str] = (),
        save: Literal["adapter", "all"] = "adapter",
    ) -> None:
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ValueError(f"{WHO}({length=}): expected how many prompts, an integer >= 0, such as 10.")
        if not isinstance(deep, bool):
            raise ValueError(f"{WHO}({deep=}): expected True, for prompts in each block, or False.")
        if layers is not None and not layers:
            raise ValueError(f"{WHO}({layers=}): expected a path, a pattern or a list of paths of blocks, or None.")
        self.length, self.deep, self.layers = length, deep, layers
        if not deep:
            self.conflicts = {**type(self).conflicts, **SHALLOW}  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
            self.refuses = {**self.refuses, Part.PIPELINE: _LONGER}  # pyright: ignore[reportAttributeAccessIssue]
        self._take(save, also)

    @property
    @override
    def neutral(self) -> bool:
        return self.length == 0

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        trained = self.begin(root)
        apart = functools.partial(side_by_side, root, always=True, batch=surgeon.batch)
        stack = find_stack(root, self.layers, who=WHO, without=apart, named=True)
        blocks = stack.blocks
        if len({*map(id, blocks)}) < len(blocks):
            raise ValueError(f"{WHO}: {stack} has a block several times; expected as many as there are places.")
        with nowhere(root):
            of, d = self._width(surgeon, blocks, str(stack))
        patches = next((m for m in root.modules() if isinstance(m, _PATCHES)), None)
        patch = d if patches is None else patches.weight[0].numel()
        last = len(blocks) - 1
        at = {id(m): i for i, m in enumerate(blocks) if self.deep or i in (0, last)}

        def build(plain: nn.Module) -> nn.Module:
            i = at[id(plain)]
            first = first_prompts(self.length, d, patch) if self.deep or i == 0 else None
            return prompted_block(plain, first, leave=self.length if self.deep or i == last else 0)

        surgeon.swap(lambda path, m: id(m) in at, build, what="a block", numbers=True)
        with nowhere(root):
            self._try(surgeon, of, str(stack))
        new = [p for name, p in root.named_parameters() if name in {f"{path}.prompts" for path in stack.named_blocks}]
        self._prompts = self.length * len(new)
        kind = f"in each of the {len(new)} blocks" if self.deep else "at the first of the blocks"
        self.freeze(surgeon, trained | {*map(id, new)}, f"{self.length} prompts of {d} numbers {kind} at {stack}")

    def _width(self, surgeon: Surgeon, blocks: list[nn.Module], stack: str) -> tuple[str, int]:
        """Of the first pass in which the blocks are handed tokens of an image: what was run, and d."""
        tried: list[str] = []
        dims: list[int] = []
        seen: list[tuple[int, ...]] = []

        def image(m: nn.Module, args: Any, kwargs: Any) -> None:
            if not dims:  # what comes in: further in, masks and heads stand in four dimensions too
                every = (*args, *kwargs.values())
                dims.extend(t.ndim for t in every if isinstance(t, Tensor) and t.is_floating_point())

        def block(m: nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(tuple(hidden_of(args, kwargs).shape))

        for of, call in attempts(surgeon.root, surgeon.batch):
            dims.clear()
            seen.clear()
            handles = [hook_before(m, image, with_kwargs=True) for m in surgeon.root.modules()]
            handles += [hook_before(m, block, with_kwargs=True) for m in blocks]
            try:
                with aside(surgeon.root):
                    call()
            except Exception as e:  # what is made up may not be what the module takes: the next may be
                tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:100] if str(e) else ''})")
                continue
            finally:
                for handle in handles:
                    handle.remove()
            tokens = bool(seen) and all(len(s) == 3 and s[0::2] == seen[0][0::2] for s in seen)
            if len(seen) == len(blocks) and tokens and {4, 5} & {*dims}:
                return of, seen[0][2]
            tried.append(f"{of} ran, and the blocks were handed {seen[0] if seen else 'nothing'}")
        raise ValueError(
            f"{WHO}: the blocks at {stack} were not seen to be run on tokens (B, T, d) of an image, each once."
            f" {'; '.join(tried[:3])}. Expected a vision transformer. Name its blocks by layers=, give a batch,"
            " lightning_eff.apply(module, technique, batch=batch), or take the technique out."
        )

    def _try(self, surgeon: Surgeon, of: str, stack: str) -> None:
        """The same pass, with prompts."""
        call = next(call for named, call in attempts(surgeon.root, surgeon.batch) if named == of)
        try:
            with aside(surgeon.root):
                call()
        except Exception as e:
            if str(e).startswith(WHO):
                raise
            raise ValueError(
                f"{WHO}: the blocks at {stack} cannot be run on {self.length} tokens more ({type(e).__name__}:"
                f" {str(e).splitlines()[0][:120] if str(e) else ''}); expected blocks that see no places: no windows,"
                " convolutions or tables of relative places. Take the technique out."
            ) from e

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "prompts": self._prompts}
