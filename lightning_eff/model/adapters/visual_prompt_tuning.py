"""VisualPromptTuning: train tokens next to the patches of an image, with the network frozen (Jia et al. 2022).

The rule is ``[E_i, Z_i] = L_i([E_i-1, P_i])`` for block L_i, the class token and patches E, and P_i of (k, d), which are the
only trained weights; Z_i is dropped (deep). Or ``[E_i, Z_i] = L_i([E_i-1, Z_i-1])`` from ``Z_0 = P`` on (shallow).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.declared import refusal
from lightning_eff._core._arguments.kinds import Layers
from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._needs.needs import Part
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core.blocks import find_stack, hidden_of
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff.model.adapters._adapter import DEAD, FROZEN, RIVALS, Adapter, blockwise, unless_memory_bound
from lightning_eff.model.adapters._arguments import Also, Length, Save
from lightning_eff.model.adapters._pieces import nowhere
from lightning_eff.model.adapters._prompts.block import prompted_block

WHO = "VisualPromptTuning"
_PATCHES = (nn.Conv2d, nn.Conv3d)
_DEPTH = "prompts enter at the first block and leave after the last, and it skips some blocks; give deep=True"
_TOKENS = "prompts are among the tokens, and it drops some of them; give deep=True"
_LONGER = "the first block returns k more tokens than it gets, and stages pass on a fixed number; give deep=True"
#: For ``conflicts``: techniques that can train with deep prompts only.
SHALLOW: Mapping[str, str] = {
    **dict.fromkeys(("StochasticDepth", "ProgressiveLayerDropping", "DropIn", "ProgressiveStacking"), _DEPTH),
    **dict.fromkeys(("ShallowToDeep", "CompoundGrowth", "AutoProg"), _DEPTH),
    **dict.fromkeys(("PatchDropout", "PartialTokenTraining", "RandomLTD", "TokenDropping"), _TOKENS),
}


def first_prompts(length: int, d: int, patch: int) -> Tensor:
    """P of (k, d): uniform in +-sqrt(6 / (patch + d)) for patches of ``patch`` numbers, as in the authors' code."""
    most = math.sqrt(6.0 / (patch + d))
    return torch.empty(length, d).uniform_(-most, most)


def _pointless(profile: RunProfile) -> str | None:
    return unless_memory_bound(profile) if profile.image_side is not None else "the samples are not images"


class VisualPromptTuning(Adapter):
    """Fine-tune a pretrained vision transformer by training k tokens next to the patches; everything else is frozen.

    With ``deep``, each block has its own prompts, and its outputs for them are dropped. Shallow prompts enter at the first
    block and pass through all. They come after the other tokens; blocks do not depend on positions, so this makes no
    difference. Layers after the stack see only the class token and patches. The stack is the longest of the module, or the
    one at ``layers``. A pass on a made-up input at setup verifies that prompts work.

    Use it to fine-tune a vision transformer for many tasks: k d trained parameters, or as many per block. Gradients and
    optimizer state are only those of the prompts. A step costs as much as k more tokens, also in evaluation, and the backward
    pass goes through the whole network. The paper also trains the head: ``also=["classifier"]``, by your module's name.

    Checkpoints hold the trained weights and all buffers, usually some kilobytes. To resume from one, the module's own code
    must make or load the same frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    VisualPromptTuning(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    ``HybridParallelStrategy`` divides the new weights like all others. Under Lightning's ``ModelParallelStrategy``, call
    ``lightning_eff.apply(self, VisualPromptTuning(...))`` in ``configure_model`` before it divides the module, and set
    ``save_distributed_checkpoint=False`` on the strategy or ``save="all"`` here. It logs ``trained`` and
    ``frozen``, the numbers of parameters, and ``prompts``, their number in all blocks.

    Args:
        length: the number of prompts. 0 is plain training. The paper has 1 to 200. Also accepted as ``num_virtual_tokens``.
        deep: whether each block has prompts, instead of only the first. Deep is better in the paper.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no stack is found, its blocks do not get the tokens
            of an image, (B, T, d), get masks or tables in addition, or accept no more tokens (windows, relative positions),
            or the strategy divides parameters in another way than FSDP2. On resume, if the module's frozen weights are not
            those of the run.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[VisualPromptTuning(10, also=["classifier"])])

    References:
        Jia et al. 2022, "Visual Prompt Tuning", arXiv:2203.12119.
    """

    saves = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Jia et al. 2022, arXiv:2203.12119"
    constraints = "fine-tuning of vision transformers whose blocks do not depend on positions"
    search_space = SearchSpace({"length": Choice((5, 10, 50)), "deep": Choice((True, False))}, _pointless)
    stays = "its prompts are tokens that no image has, and a plain module has no place for them"
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **FROZEN,
        **blockwise("prompts"),
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters", "PromptTuning"), RIVALS),
        **dict.fromkeys(
            ("GatedPositionalAttention", "Linformer"),
            "its attention depends on the patches' positions, and prompts have none",
        ),
        "TokenMerging": "its attention counts the tokens that each token stands for, and prompts come in after that count",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"length": 0}
    _prompts = 0

    def __init__(
        self,
        length: Length = 10,
        *,
        deep: bool = True,
        layers: Layers | None = None,
        also: Also = (),
        save: Save = "adapter",
    ) -> None:
        if layers == "":
            raise refusal(type(self), "layers", layers, "a dotted path, a pattern or a list of dotted paths, or None")
        self.length, self.deep, self.layers = length, deep, layers
        if not deep:
            self.conflicts = {**type(self).conflicts, **SHALLOW}  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
            self.refuses = {**self.refuses, Part.PIPELINE: _LONGER}  # pyright: ignore[reportAttributeAccessIssue]
        self._take(save, also)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        trained = self.begin(root)
        apart = functools.partial(side_by_side, root, always=True, batch=surgeon.batch)
        stack = find_stack(root, self.layers, who=WHO, without=apart, named=True)
        blocks = stack.blocks
        if len({*map(id, blocks)}) < len(blocks):
            raise ValueError(
                f"{WHO}: {stack} has a block several times. Name another stack with layers=, or remove it."
            )
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
        """The first pass in which the blocks get tokens of an image, and d."""
        tried: list[str] = []
        dims: list[int] = []
        seen: list[tuple[int, ...]] = []

        def image(m: nn.Module, args: Any, kwargs: Any) -> None:
            if not dims:  # only the outer call: inside, masks and heads have four dimensions too
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
            except Exception as e:  # the module may not accept a made-up input, and may accept the next
                tried.append(f"{of} raised {type(e).__name__} ({first_line(e, 100)})")
                continue
            finally:
                for handle in handles:
                    handle.remove()
            tokens = bool(seen) and all(len(s) == 3 and s[0::2] == seen[0][0::2] for s in seen)
            if len(seen) == len(blocks) and tokens and {4, 5} & {*dims}:
                return of, seen[0][2]
            tried.append(f"in {of}, the blocks got {seen[0] if seen else 'nothing'}")
        raise ValueError(
            f"{WHO}: the blocks at {stack} did not each get tokens (B, T, d) of an image once ({'; '.join(tried[:3])}). Name"
            f" blocks of a vision transformer with layers=, or call lightning_eff.apply(module, {WHO}(), batch=batch)."
        )

    def _try(self, surgeon: Surgeon, of: str, stack: str) -> None:
        """Run the same pass with prompts."""
        call = next(call for named, call in attempts(surgeon.root, surgeon.batch) if named == of)
        try:
            with aside(surgeon.root):
                call()
        except Exception as e:
            if str(e).startswith(WHO):
                raise
            raise ValueError(
                f"{WHO}: the blocks at {stack} cannot run on {self.length} more tokens ({type(e).__name__}:"
                f" {first_line(e, 120)}), as with windows, convolutions or relative positions. Name other blocks"
                " with layers=, or remove the callback."
            ) from e

    # -- reports

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "prompts": self._prompts}
