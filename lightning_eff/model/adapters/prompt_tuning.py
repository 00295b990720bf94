"""PromptTuning: learnt numbers before the embeddings of each text, with the whole model frozen (Lester et al. 2021).

The rule is ``f([P; E(x)])`` for x of T tokens, E(x) of (T, d) and P of (k, d), which alone is trained.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._branches.pieces import step_of
from lightning_eff._core._branches.tracing import looked_at
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._tokens.embeddings import token_embeddings
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking_on
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter
from lightning_eff.model.adapters._pieces import divides, nowhere
from lightning_eff.model.adapters._prompts.embedding import prompted
from lightning_eff.model.adapters._prompts.network import network
from lightning_eff.model.adapters._prompts.prefixing import Prefix, hooked

WHO = "PromptTuning"
COMMON = 5000  # rows of the table that prompts begin at: vocabularies have common tokens first
PASSES = 4  # at the first batch: as it is, on a token before the text, on prompts like that token, and on the prompts
WIDTH = 0.5  # of uniform numbers, each way, as the paper has them


def first_prompts(embedding: nn.Embedding, length: int, init: str) -> Tensor:
    """P of (k, d): embeddings of common tokens, none twice where there are enough, or uniform numbers."""
    if init == "uniform":
        return torch.empty(length, embedding.embedding_dim).uniform_(-WIDTH, WIDTH)
    common = min(embedding.num_embeddings, COMMON)
    drawn = torch.cat([torch.randperm(common) for _ in range(-(-length // common))])[:length]
    with torch.no_grad():
        return embedding(drawn[None].to(embedding.weight.device))[0].clone()


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are no texts"
    return None if profile.memory_bound else "memory limits neither batch nor model, and all weights end better"


class PromptTuning(Adapter):
    """Fine-tune a pretrained language model by k prompts before each text alone: k d numbers.

    The network is called with k more ids, whose look-ups are the prompts, and what it returns is cut to the text's own places:
    positions, masks and rotary tables are what it computes of k + T tokens, and a loss sees T logits with the labels that
    belong to them. It is the smallest module that has all blocks in it and is called with the ids; it and the token embedding
    are found in a pass over an input that is made up. Arguments that go along are masks (B, T), positions and types of tokens.

    At the first batch, and at longer texts than before, the network is tried in some forward passes: prompts that are the
    embeddings of a token must do what that token does.

    **It learns slowly**, wants large rates (0.3 in the paper), and is behind full tuning below some billions of parameters by
    its authors' own figures. A step costs what k tokens more cost; the backward pass goes through the whole network. A pooler
    that takes the first place takes a prompt.

    Checkpoints hold the prompts, and all buffers: a run resumes from one where the module's own code makes or loads the weights
    that the run began with, which is looked at. Without a Trainer load one with ``lightning_eff.apply(plain,
    PromptTuning(...)).load_state_dict(checkpoint["state_dict"], strict=False)``. Generate with ``use_cache=False``.

    ``HybridParallelStrategy`` divides what was put in with all else, but in no pipeline. Under Lightning's
    ``ModelParallelStrategy`` let ``configure_model`` call ``lightning_eff.apply(self, PromptTuning(...))`` before it
    divides the module, and give the strategy ``save_distributed_checkpoint=False``, or the technique ``save="all"``.

    Logged: ``trained`` and ``frozen``, how many numbers, and ``prompts``.

    Args:
        length: k, an integer; 0 is plain training. The model must have room for k + T tokens.
        init: "vocabulary" begins at the rows of common tokens, "uniform" at numbers in [-0.5, 0.5].
        embeddings: the token embedding's dotted path, its last part or a pattern; None looks for it.
        also: patterns of parameters, or modules, that train as a whole beside, such as a new head.
        save: "adapter" for checkpoints of what trains, "all" for whole ones.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where there is no token embedding, no call with ids could be
            seen, tokens are looked up several times, as in encoder-decoders, or the network is compiled; at the first
            batch, where the network has no room for k tokens more, reads ids beside its embedding, or is handed something
            along the text that is not known; where a cache holds earlier tokens; under strategies that divide parameters
            otherwise; from a checkpoint without the frozen weights, where the module has others than its run began with.

    Sources:
        Lester et al. 2021, arXiv:2104.08691.
    """

    saves: ClassVar[str] = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper: ClassVar[str] = "Lester et al. 2021, arXiv:2104.08691"
    constraints: ClassVar[str] = "language models of one text with room for k tokens more; no cache in generation"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (prompts)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"length": Choice((5, 20, 100))}, _pointless)
    control: ClassVar[Control] = Control("the baseline, which tunes all weights, for as many seconds")
    stays: ClassVar[str] = "its prompts are no tokens, and stand before each text; no plain module has a place for them"
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters"), RIVALS),
        "GradientCentralization": "it centres the gradients of maps' weights, which are frozen here",
        "ReplaceOptimizer": "it steps hidden matrices, which are frozen here",
        "KFAC": "it preconditions the weights of maps, which are frozen here",
        "NgramEmbedding": "it looks up n-grams of ids, and prompts have none",
        "FixRes": "it ends by training the classifier and norms alone, which are frozen here",
        "GreedyLayerwise": "it trains some blocks at a time, which are frozen here",
        "LayerFreezing": "behind blocks that it freezes there is no gradient, and prompts lie behind all of them",
    }
    refuses: ClassVar[Reasons] = {
        **Adapter.refuses,
        Part.PIPELINE: "the technique tries the network whole, and cuts what it returns",
    }
    needs_automatic_optimization: ClassVar[bool] = True
    _length = 0

    def __init__(
        self,
        length: int = 20,
        *,
        init: Literal["vocabulary", "uniform"] = "vocabulary",
        embeddings: str | None = None,
        also: tuple[str, ...] | list[str] = (),
        save: Literal["adapter", "all"] = "adapter",
    ) -> None:
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ValueError(f"{WHO}({length=}): expected how many prompts, an integer >= 0, such as 20.")
        if init not in ("vocabulary", "uniform"):
            raise ValueError(f"{WHO}({init=}): expected 'vocabulary' or 'uniform'.")
        if embeddings is not None and not (isinstance(embeddings, str) and embeddings):
            raise ValueError(f"{WHO}({embeddings=}): expected the path of an nn.Embedding, such as 'wte', or None.")
        self.length, self.init, self.embeddings = length, init, embeddings
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
        found = token_embeddings(root, self.embeddings, who=WHO)
        if compiled_around(root, found.values()):
            raise ValueError(
                f"{WHO}: the token embedding of {type(root).__name__} lies in what is compiled as one; expected a network that"
                " is called as it is. Compile blocks one by one (block.compile()), or take the technique out."
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
        """Before the first step, and longer texts, in a pass beside it: what does not work is told."""
        length = max((t.shape[1] for _, t in tensors(batch) if t.ndim == 2 and not t.is_floating_point()), default=1)
        if not self._longest:
            self._longest = length if on_all_ranks(self.session, lambda: self._tried(step, batch)) else 0
        elif divides(self.session):
            pass  # the hooks try it, on all ranks at once, since no rank can run the network alone
        elif length > self._longest and self._tried(step, batch):  # as long as others' on one rank alone
            self._longest = length
        return proceed(batch)

    def _tried(self, step: Step, batch: Any) -> bool:
        session, hooks = self.session, hooked(step.module)
        before = {path: prefix.given for path, prefix in hooks.items()}
        with looking_on(), looked_at(session), torch.no_grad():
            output = step_of(session, batch, step.batch_idx)
        for path, prefix in hooks.items():
            if output is not None and prefix.given == before[path]:
                raise ValueError(
                    f"{WHO}: training_step did not call {path or 'the module itself'}, whose calls get the prompts, so that"
                    " they had no effect; expected a step that calls it, and not its forward or its parts. Take the"
                    " technique out."
                )
        session.chain.cost.forward_passes += PASSES
        with suppress(ValueError):  # batches of no tensors have no samples to count
            session.chain.cost.forward_samples += PASSES * num_samples(batch)
        return output is not None

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "prompts": self._length}
