"""PromptTuning: train prompts before the embeddings of each text, with the model frozen (Lester et al. 2021).

The rule is ``f([P; E(x)])`` for x of T tokens, E(x) of (T, d) and P of (k, d); only P is trained.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Text
from lightning_eff._core._branches.sharded_step import step_of
from lightning_eff._core._branches.tracing import looked_at
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._tokens.embeddings import token_embeddings
from lightning_eff._core.batches import tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff.model.adapters._adapter import DEAD, FROZEN, RIVALS, Adapter, blockwise, unless_memory_bound
from lightning_eff.model.adapters._arguments import Also, Length, Save
from lightning_eff.model.adapters._pieces import divides, nowhere
from lightning_eff.model.adapters._prompts.embedding import prompted
from lightning_eff.model.adapters._prompts.network import network
from lightning_eff.model.adapters._prompts.prefixing import Prefix, hooked

WHO = "PromptTuning"
COMMON = 5000  # rows of the table for initial prompts: vocabularies start with common tokens
PASSES = (
    4  # on the first batch: plain, with a token before the text, with prompts equal to that token, with the prompts
)
WIDTH = 0.5  # of the uniform distribution around zero, as in the paper


def first_prompts(embedding: nn.Embedding, length: int, init: str) -> Tensor:
    """P of (k, d): embeddings of common tokens, without repetition if there are enough, or uniform numbers."""
    if init == "uniform":
        return torch.empty(length, embedding.embedding_dim).uniform_(-WIDTH, WIDTH)
    common = min(embedding.num_embeddings, COMMON)
    drawn = torch.cat([torch.randperm(common) for _ in range(-(-length // common))])[:length]
    with torch.no_grad():
        return embedding(drawn[None].to(embedding.weight.device))[0].clone()


def _pointless(profile: RunProfile) -> str | None:
    return unless_memory_bound(profile) if profile.sequence_length is not None else "the samples are not texts"


class PromptTuning(Adapter):
    """Fine-tune a pretrained language model by training k prompts before each text; the model is frozen.

    The network is called with k more ids, whose embeddings are the prompts, and its outputs are cut to the text's own
    positions. It computes positions, masks and rotary tables for k + T tokens itself, and the loss sees T logits with their
    labels. This network is the smallest module that contains all blocks and is called with the ids. It and the token
    embedding are found in a pass on a made-up input. Other arguments may be masks (B, T), positions and token types. On the
    first batch, and on texts longer than before, some forward passes verify the network: prompts equal to the embedding of a
    token must have the effect of that token.

    Use it for large models with many tasks: k d trained parameters per task. **It learns slowly**, needs high learning rates
    (0.3 in the paper), and is worse than full fine-tuning below some billions of parameters, by the paper's own figures. A
    step costs as much as k more tokens, and the backward pass goes through the whole network. A pooler that reads the first
    position reads a prompt.

    Checkpoints hold the trained weights and all buffers, usually some kilobytes. To resume from one, the module's own code
    must make or load the same frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    PromptTuning(...)).load_state_dict(checkpoint["state_dict"], strict=False)``. Generate with ``use_cache=False``.

    ``HybridParallelStrategy`` divides the new weights like all others, except in a pipeline. Under Lightning's
    ``ModelParallelStrategy``, call ``lightning_eff.apply(self, PromptTuning(...))`` in ``configure_model`` before it divides
    the module, and set ``save_distributed_checkpoint=False`` on the strategy or ``save="all"`` here. It logs ``trained`` and
    ``frozen``, the numbers of parameters, and ``prompts``, their number.

    Args:
        length: the number of prompts. 0 is plain training. The model must have room for k + T tokens. Also accepted as
            ``num_virtual_tokens``.
        init: the initial prompts. "vocabulary" takes embeddings of common tokens, "uniform" numbers in [-0.5, 0.5].
        embeddings: the dotted path of the token embedding, its last part, or a pattern. None finds it.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no token embedding, no call with ids was
            seen, tokens are looked up several times as in encoder-decoders, the network is compiled, or the strategy divides
            parameters in another way than FSDP2. On the first batch, if the network has no room for k more tokens, reads ids
            elsewhere than in its embedding, or gets an unknown argument along the text. In a call with a cache. On resume, if
            the module's frozen weights are not those of the run.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[PromptTuning(20)])

    References:
        Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", arXiv:2104.08691.
    """

    saves = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Lester et al. 2021, arXiv:2104.08691"
    constraints = "language models of one text with room for k more tokens; no cache in generation"
    search_space = SearchSpace({"length": Choice((5, 20, 100))}, _pointless)
    stays = "its prompts are not tokens, and a plain module has no place for them before each text"
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **FROZEN,
        **blockwise("prompts"),
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters"), RIVALS),
        "NgramEmbedding": "it looks up n-grams of ids, and prompts have no ids",
        "GreedyLayerwise": "it trains some blocks at a time, and all blocks are frozen here",
        "LayerFreezing": "it stops gradients at the blocks that it freezes, and prompts come before all blocks",
    }
    refuses: ClassVar[Reasons] = {
        **Adapter.refuses,
        Part.PIPELINE: "it runs the whole network to verify it, and cuts what it returns",
    }
    needs_automatic_optimization: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"length": 0}
    _length = 0

    def __init__(
        self,
        length: Length = 20,
        *,
        init: Literal["vocabulary", "uniform"] = "vocabulary",
        embeddings: Annotated[str | None, Text("a dotted path")] = None,
        also: Also = (),
        save: Save = "adapter",
    ) -> None:
        self.length, self.init, self.embeddings = length, init, embeddings
        self._take(save, also)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        trained = self.begin(root)
        found = token_embeddings(root, self.embeddings, who=WHO)
        if compiled_around(root, found.values()):
            raise ValueError(
                f"{WHO}: the token embedding of {type(root).__name__} is in a module that is compiled as a whole. Compile"
                " blocks one by one with block.compile(), or remove the callback."
            )
        with nowhere(root):
            of = network(root, found, surgeon.batch, who=WHO)
        inside = {id(m) for m in of.module.modules()}
        (plain,) = {id(m): m for m in found.values() if id(m) in inside}.values()

        def build(m: nn.Module) -> nn.Module:
            assert isinstance(m, nn.Embedding)
            return prompted(m, first_prompts(m, self.length, self.init))

        surgeon.swap(lambda path, m: m is plain, build, what="a token embedding", numbers=True)
        new: Any = next(m for m in of.module.modules() if hasattr(m, "prompts") and m.waiting is False)
        prefix = Prefix(new, of.ids, who=WHO)
        surgeon.before(of.module, prefix.before)
        surgeon.behind(of.module, prefix.behind)
        self._length = self.length
        where = f"{self.length} prompts of {plain.embedding_dim} numbers in each call of {of.path or 'the module'}"
        self.freeze(surgeon, trained | {id(new.prompts)}, f"{where} ({type(of.module).__name__})")

    # -- the run

    @override
    def on_model(self, session: Session) -> None:
        super().on_model(session)
        for prefix in hooked(session.module).values():
            prefix.divided = divides(session)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        for prefix in hooked(session.module).values():
            prefix.divided = False

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._longest = 0
        session.chain.add(Stage.MEASURE, self._look)

    def _look(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Before the first step and before longer texts, verify the network in additional passes."""
        length = max((t.shape[1] for _, t in tensors(batch) if t.ndim == 2 and not t.is_floating_point()), default=1)
        if not self._longest:
            self._longest = length if on_all_ranks(self.session, lambda: self._tried(step, batch)) else 0
        elif divides(self.session):
            pass  # the hooks verify it on all ranks at once, because no rank can run the network alone
        elif length > self._longest and self._tried(step, batch):  # a rank may have longer texts than others
            self._longest = length
        return proceed(batch)

    def _tried(self, step: Step, batch: Any) -> bool:
        session, hooks = self.session, hooked(step.module)
        before = {path: prefix.given for path, prefix in hooks.items()}
        with looked_at(session), torch.no_grad():
            output = step_of(session, batch, step.batch_idx)
        for path, prefix in hooks.items():
            if output is not None and prefix.given == before[path]:
                raise ValueError(
                    f"{WHO}: training_step did not call {path or 'the module itself'}, whose calls get the prompts. Call it"
                    " instead of its forward or its parts, or remove the callback."
                )
        session.chain.cost.add(batch, forward=PASSES)
        return output is not None

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "prompts": self._length}
