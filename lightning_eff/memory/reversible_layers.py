"""ReversibleLayers: inputs of blocks are computed from their outputs in the backward pass (Gomez et al. 2017).

``_reversible.streams`` holds the equations and the engine.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Either, Names, Text
from lightning_eff._core._branches.probing import WAYS_OUT, aside, attempts
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._needs.needs import UNTRIED, Need, Part, Reasons
from lightning_eff._core._resume.marks import Marked
from lightning_eff._core.blocks import Candidate, find_stack, refuse_compiled_around
from lightning_eff._core.search_space import SearchSpace, needs_blocks, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.memory._recompute.calls import refuse_checkpointed
from lightning_eff.memory._reversible.calls import WHO, NotReversible
from lightning_eff.memory._reversible.streams import Streams

DRIFT = 1e-2  #: the relative error of a recomputed input from which on a run stops
_EVERY = 50  # steps between two looks at the drift, which wait for the device
_SKIPS = "it skips blocks or gives them other hidden states, so the first stream would be lost"
_ALONE = "it tries single blocks without those before them, from which the first stream comes"
_TWICE = "both decide what is kept of each block"


class ReversibleBlock(Derived, Marked):
    """A mixin for a class of blocks that computes its residual sums on two streams, with a mark in checkpoints.

    Attributes:
        index: its place in the stack.
        streams: what the blocks of the stack share.
    """

    prefix = "Reversible"
    outermost = True  # what other techniques compute in a block must run again with it

    index: int
    streams: Streams

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.streams.call(self.index, self, super().forward, args, kwargs)


def _reversible(plain: nn.Module, index: int, streams: Streams) -> ReversibleBlock:
    made = derived(ReversibleBlock, plain, index=index, streams=streams)
    made.mark(1.0, "a reversible block")
    return made


class ReversibleLayers(Architecture):
    """Save the memory of activations with reversible residual blocks, whose inputs are computed from their outputs.

    Each block of a stack must compute ``h = x + F(x)``, then ``h + G(h)``, as pre-norm transformer blocks do with attention and
    a feed-forward network. With this technique the stack has two streams of the same shape:

    ``y1 = x1 + F(x2)``, ``y2 = x2 + G(y1)``

    Both streams begin as the stack's input, and its output is their mean. The backward pass computes ``x2 = y2 - G(y1)`` and
    ``x1 = y1 - F(x2)``, with the dropout masks of the forward pass. Activations need the memory of one branch of one block and
    of three hidden states, whatever the number of blocks, and each block keeps 10 kB of random state.
    ``Rematerialization("full")`` keeps one hidden state per block in addition. Both add one forward pass.

    Use it to train a deep network from scratch if hidden states alone fill the memory. **It changes the model**: two streams
    are another function than one, in evaluation too. A pretrained module computes something else afterwards. Parameters keep
    their names and shapes. Checkpoints load into ``lightning_eff.apply(plain, ReversibleLayers())``, which gives the function
    that was trained. The plain module refuses them by a mark, because it computes something else, and so does
    ``lightning_eff.export``.

    Gradients are those of the two-stream network up to rounding. An input that is computed from outputs differs from the true
    one by rounding errors, which grow with depth: by 2e-7 after 24 untrained blocks in float32. The technique logs this
    relative error as ``drift``, and stops the run if it exceeds 0.01. Streams in half precision are refused; under autocast
    they have float32. It logs ``reruns`` too, the runs of branches that the backward pass adds per step.

    A pass on generated inputs, or on the batch that is given to ``apply``, shows the two sums of each block, and compares the
    computed inputs with the true ones.

    Args:
        layers: the stack of blocks: a dotted path, a pattern or a list of dotted paths. None finds it, ``[]`` is
            plain training.

    Raises:
        ValueError: at setup or in ``apply``, if a block does not compute two such sums (post-norm blocks, parallel branches,
            decoders with cross-attention), its inputs do not follow from its outputs, or code between blocks changes the hidden
            state.
        RuntimeError: in a training step, if ``drift`` exceeds 0.01, for second derivatives, or if a branch computes something
            else the second time.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ReversibleLayers()])

    References:
        Gomez et al. 2017, "The Reversible Residual Network: Backpropagation Without Storing Activations", arXiv:1707.04585.
        Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451.
    """

    saves = "nearly all activation memory of the blocks, at the cost of one forward pass"
    paper = "Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451"
    constraints = "blocks of two residual branches; streams of float32; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, lambda profile: needs_blocks(profile) or needs_memory_bound(profile))
    control = Control("the baseline for the same time, under Rematerialization if memory limits its batch")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                *("StochasticDepth", "ProgressiveLayerDropping", "ProgressiveStacking", "CompoundGrowth", "AutoProg"),
                *("DropIn", "GreedyLayerwise", "LayerFreezing", "ShallowToDeep", "RandomLTD", "TokenDropping"),
                *("TokenMerging", "ManifoldMixup", "StyleMix", "VisualPromptTuning"),
                *("EmbeddingShortcuts", "UShapedSkips", "MaskGuidedTokens"),
            ),
            _SKIPS,
        ),
        **dict.fromkeys(("SequencePacking", "PatchDropout", "PartialTokenTraining"), _ALONE),
        "StochasticRoundingBF16": "inputs cannot be computed accurately from outputs in bfloat16",
        "OptimizerInBackward": "it updates weights of a block before both branches of the block have run again",
        "Rematerialization": _TWICE,
        "RegionalCompilation": "compiled blocks do not show their residual sums",
    }
    needs: ClassVar[Need] = Need.MODULE | Need.SAVED
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    change_at = Change.STRUCTURE
    stays = "no plain block computes two streams"
    neutral_at: ClassVar[Mapping[str, Any]] = {"layers": []}

    def __init__(
        self,
        layers: Annotated[
            str | Sequence[str] | None, Either(Text("a dotted path, a pattern", empty=True), Names("dotted paths"))
        ] = None,
    ) -> None:
        self.layers = layers if layers is None or isinstance(layers, str) else list(layers)

    def _reset(self) -> None:
        self._streams: Streams | None = None
        self._reruns = self._steps = self._last = 0
        self._drift: Tensor | float = 0.0

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        apart = functools.partial(side_by_side, root, always=True, batch=surgeon.batch)
        stack = find_stack(root, self.layers, who=WHO, without=apart, named=True)
        if len({*map(id, stack.blocks)}) < len(stack.blocks):
            raise ValueError(
                f"{WHO}: {stack} has a block several times. Name another stack with layers=, or remove it."
            )
        refuse_checkpointed(root, stack, who=WHO)
        refuse_compiled_around(root, stack.path, who=WHO)
        streams = Streams(len(stack.blocks))
        at = {id(block): index for index, block in enumerate(stack.blocks)}
        surgeon.swap(
            lambda path, m: id(m) in at,
            lambda m: _reversible(m, at[id(m)], streams),
            what="a block",
        )
        self._try(surgeon, streams, stack)
        rank_zero_info(f"{WHO}: the {len(stack.blocks)} blocks of {stack} compute two streams.")

    def _try(self, surgeon: Surgeon, streams: Streams, stack: Candidate) -> None:
        """Run the module, to see two sums in each block, and compare the inverse of each with its input."""
        tried: list[str] = []
        root = surgeon.root
        for of, call in attempts(root, surgeon.batch):
            streams.begin()
            streams.checked = set()
            try:
                with aside(root):
                    call()
            except NotReversible:
                raise
            except Exception as e:  # the module may not accept this input, but the next one
                tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:120] if str(e) else ''})")
            else:
                if len(streams.checked) == streams.length:
                    streams.begin()
                    return
                tried.append(f"{of} ran {len(streams.checked)} of the {streams.length} blocks of {stack}")
        raise ValueError(
            f"{WHO}: could not compare inputs with outputs of blocks in {type(root).__name__}:"
            f" {'; '.join(tried[:3]) or 'there was nothing to run'}. {WAYS_OUT.partition('; or the names')[0]}. Or remove"
            f" {WHO}."
        )

    # -- the run

    @override
    def on_optimizers(self, session: Session) -> None:
        found = (m for m in session.module.modules() if isinstance(m, ReversibleBlock))
        self._streams = next(found).streams
        self._streams.begin()

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        assert self._streams is not None, "on_optimizers finds it"
        self._last, self._streams.reruns = self._streams.reruns, 0
        self._reruns += self._last
        self._steps += 1
        self._drift = drift = 0.0 if self._streams.drift is None else self._streams.drift
        if self._steps % _EVERY == 1 and not bool(drift <= DRIFT):
            raise RuntimeError(
                f"{WHO}: the input of the stack, computed from its output, has a relative error of {float(drift):.1e}; expected"
                f" at most {DRIFT}. Gradients are wrong. Name fewer blocks with layers=, train in float64, or use"
                " Rematerialization."
            )

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._streams = None

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"reruns": self._last, "drift": self._drift}

    @override
    def summary(self) -> str:
        return f"{self._reruns / max(self._steps, 1):.1f} more runs of branches per step"
