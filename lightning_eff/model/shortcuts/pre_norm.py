"""PreNorm: the norms of post-norm blocks, moved to the beginning of their residual branches (Xiong et al. 2020).

``_pre_normed`` holds the equations and the blocks.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Either, Names, Text
from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._branches.side_by_side import as_it_was
from lightning_eff._core._branches.sums import Run, calls_of
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core.blocks import Candidate, split_output
from lightning_eff._core.search_space import SearchSpace, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.shortcuts._fed import chain
from lightning_eff.model.shortcuts._pre_normed import (
    FINAL,
    WHO,
    NotPostNorm,
    Place,
    PreNormBlock,
    Within,
    is_norm,
    norms_of,
)
from lightning_eff.model.shortcuts._technique import DEPTH


class Padded(Derived):
    """A mixin for ``nn.TransformerEncoder`` that passes padded tensors to its blocks in evaluation too."""


class PreNorm(Architecture):
    """Normalise the input of each residual branch instead of the sum behind it, and the output of the last block.

    Each block of a stack must compute ``h = N1(x + F(x))``, then ``N2(h + G(h))``, as BERT's blocks and
    ``nn.TransformerEncoderLayer`` do with attention F and a feed-forward network G. With this technique it computes

    ``h = x + F(N1(x))``, then ``h + G(N2(h))``

    with the same weights. The blocks of decoders, with three branches, and other numbers of branches follow the same rule. The
    output of the last block goes through a further norm, unless the module applies one there already. That norm begins as a
    copy of the block's last one.

    Use it to pretrain a post-norm model. Gradients at initialization do not grow towards the last blocks, so training is stable
    at higher learning rates and with little or no warmup. Cramming found that the gain comes from the higher learning rate
    alone. It costs one norm per pass. **It changes the model**: a pretrained module computes something else afterwards. The
    embedding's norm stays. Checkpoints have a mark in each block, ``lightning_eff_mark``, so that the plain module does not
    load them. Load them into ``lightning_eff.apply(plain, PreNorm())``. ``export`` refuses. It logs ``blocks``, their number.

    The code of the blocks runs unchanged, and its sums and the calls of its norms are replaced while it runs. A pass at setup
    shows which modules are norms: they get a sum, have no matrices, and return the same for a multiple of their input.
    ``nn.TransformerEncoder`` uses neither its fused kernel nor nested tensors in evaluation.

    Args:
        layers: the stack of blocks: a dotted path, a pattern or a list of dotted paths. None finds the longest stack, ``[]``
            is plain training.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if no stack of blocks is found, its blocks are pre-norm
            already, have no norms that are modules, or do not feed each other, or no pass shows whether they do.
        RuntimeError: in a step, if a block computes something else than at setup, or recomputes a part of itself.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[PreNorm()])

    References:
        Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", arXiv:2002.04745.
        Geiping & Goldstein 2022, "Cramming: Training a Language Model on a Single GPU in One Day", arXiv:2212.14034.
    """

    saves = "steps: it trains at higher learning rates, with less warmup; costs one norm per pass"
    paper = "Xiong et al. 2020, arXiv:2002.04745; Geiping & Goldstein 2022, arXiv:2212.14034"
    constraints = "blocks with norms behind their residual sums; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, needs_blocks)
    control = Control("the baseline for the same time, with its learning rate and warmup tuned")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (*DEPTH, "GreedyLayerwise"), "the last block, which has the final norm, does not run in all passes"
        ),
        "ReversibleLayers": "the last block has a norm behind its second sum",
        "ParameterSharing": "the last block has one norm more than the others",
        "RegionalCompilation": "compiled blocks do not show their residual sums",
    }
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    change_at = Change.STRUCTURE
    stays = "no plain post-norm block computes pre-norm"
    neutral_at: ClassVar[Mapping[str, Any]] = {"layers": []}
    _count = 0

    def __init__(
        self,
        layers: Annotated[
            str | Sequence[str] | None, Either(Text("a dotted path, a pattern", empty=True), Names("dotted paths"))
        ] = None,
    ) -> None:
        self.layers = layers if layers is None or isinstance(layers, str) else list(layers)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        stack = chain(surgeon, self.layers, who=WHO, least=1)
        self._pad(surgeon, stack)
        norms, ends = self._look(surgeon, stack)
        blocks = {id(block): Place() for block in stack.blocks}
        last = stack.blocks[-1]
        final = None if ends else copy.deepcopy(last.get_submodule(norms[id(last)][-1]))
        for block in stack.blocks:
            for path in dict.fromkeys(norms[id(block)]):
                surgeon.before(block.get_submodule(path), Within(blocks[id(block)]))

        def build(plain: nn.Module) -> PreNormBlock:
            made = derived(PreNormBlock, plain, norms=norms[id(plain)], place=blocks[id(plain)])
            made.mark(1.0, "a pre-norm block")
            if plain is last and final is not None:
                made.add_module(FINAL, final)
            return made

        surgeon.swap(lambda path, m: id(m) in blocks, build, what="a block")
        self._count = len(blocks)
        rank_zero_info(
            f"{WHO}: {self._count} blocks of {stack} are pre-norm"
            f"{', and the module has a final norm' if ends else ', with a final norm in the last one'}."
        )

    def _pad(self, surgeon: Surgeon, stack: Candidate) -> None:
        """Let torch's encoder pass no nested tensors, which only its fused post-norm kernel accepts."""

        def nests(path: str, m: nn.Module) -> bool:
            inside = isinstance(m, nn.TransformerEncoder) and m.layers[-1] is stack.blocks[-1]
            return bool(path) and inside and bool(m.use_nested_tensor)

        if any(nests(path, m) for path, m in surgeon.root.named_modules()):
            surgeon.swap(nests, lambda m: derived(Padded, m, use_nested_tensor=False), what="an encoder")

    def _look(self, surgeon: Surgeon, stack: Candidate) -> tuple[dict[int, tuple[str, ...]], bool]:
        """Run the module, and return the paths of each block's norms by its id, and whether a norm follows the last block."""
        root, blocks = surgeon.root, stack.blocks
        within = {id(m) for block in blocks for m in block.modules()}
        around = [m for m in root.modules() if id(m) not in within]
        at = {id(block): i for i, block in enumerate(blocks)}
        tried: list[str] = []
        for of, call in attempts(root, surgeon.batch, blocks=False):
            found: dict[int, tuple[str, ...]] = {}
            left: list[Tensor] = []
            ends: list[nn.Module] = []

            def look(
                block: nn.Module,
                run: Run,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                found: dict[int, tuple[str, ...]] = found,
                left: list[Tensor] = left,
            ) -> Any:
                output, found[id(block)] = norms_of(at[id(block)], block, run, args, kwargs)
                if at[id(block)] == len(blocks) - 1:
                    left.append(split_output(output)[0])
                return output

            def follow(
                m: nn.Module,
                run: Run,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                left: list[Tensor] = left,
                ends: list[nn.Module] = ends,
            ) -> Any:
                output = run(*args, **kwargs)
                if args and any(args[0] is hidden for hidden in left) and is_norm(m, run, args, kwargs, output):
                    ends.append(m)
                return output

            with as_it_was(root), aside(root), ExitStack() as scope:
                scope.enter_context(calls_of(around, follow))
                scope.enter_context(calls_of(blocks, look))
                try:
                    call()
                except NotPostNorm:
                    raise
                except Exception as e:  # the module may not take these made-up inputs, but the next ones
                    tried.append(f"{of} raised {type(e).__name__} ({first_line(e, 120)})")
                    continue
            if len(found) == len(blocks):
                return found, bool(ends)
            tried.append(f"{of} ran {len(found)} of {len(blocks)} blocks")
        raise ValueError(
            f"{WHO}: could not look at the blocks of {stack}: {'; '.join(tried[:2]) or 'nothing could be run'}. Give a batch,"
            f" lightning_eff.apply(module, {WHO}(), batch=batch), or an example_input_array to the LightningModule."
        )

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"blocks": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} blocks are pre-norm" if self._count else "the blocks were pre-norm already"
