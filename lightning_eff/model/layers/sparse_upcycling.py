"""SparseUpcycling: give feed-forward networks several experts, which begin as copies of it (Komatsuzaki et al. 2023).

The rule is ``y_t = sum_e w_te f_e(x_t)`` over the experts e that compute token t, with ``w_te`` from ``softmax(R x_t)``.
``_experts.routing`` holds the two ways to choose experts, and the balance loss.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count, Each, Either, Number, OneOf
from lightning_eff._core._arguments.objects import FilePath
from lightning_eff._core._branches.sharded_step import step_of
from lightning_eff._core._branches.tracing import looked_at
from lightning_eff._core._needs.needs import UNTRIED, Need, Part, Reasons
from lightning_eff._core._needs.offers import parts_of
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._stack.finding import repeated
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._experts.finding import Looked, Network, Sight, Watch, check_same, networks_of
from lightning_eff.model.layers._experts.module import Dispatch, ExpertLinear, Seen, dispatches
from lightning_eff.model.layers._experts.states import take_states
from lightning_eff.model.layers._experts.torch_encoder import call_layers

WHO = "SparseUpcycling"


def chosen_blocks(length: int, blocks: str | Sequence[int]) -> list[int]:
    """Return the indices of the blocks that get experts: every second one from the second on, or the last half."""
    if blocks == "alternate":
        return [*range(1, length, 2)]
    return [*range(length - length // 2, length)] if blocks == "last" else [i for i in blocks if isinstance(i, int)]


class SparseUpcycling(Architecture):
    """Turn a trained dense transformer into a mixture of experts, and train it on.

    Each expert begins as a copy of the block's feed-forward network ``W_2 f(W_1 x)``, in gated forms too. A new router, a
    linear layer with random weights of standard deviation 0.02, sends tokens to experts. The products per token grow with
    ``choices`` only. The memory of weights, gradients and optimizer states grows with ``experts``.

    * Under ``routing="experts"`` (Expert Choice), each expert takes the ``choices T / experts`` tokens of a sequence of T for
      which its probability is largest. Loads are equal. Some tokens get no expert, and others get several. A token's experts
      depend on later tokens, so causal blocks are refused. Padding takes places too.
    * Under ``routing="tokens"``, each token takes its ``choices`` most probable experts. An expert has room for ``capacity``
      times its mean load, and drops tokens that come later in the sequence. A loss that balances the loads is added to the
      loss of ``training_step``, times ``balance``.

    Gradients in a pass show whether a block sees later tokens. By default experts choose in blocks that do, and tokens choose
    in causal blocks, as in the paper. Sequences are routed separately, so outputs do not depend on other samples; the paper
    routes groups of sequences. A module that joins samples and tokens before the network has one group per batch.

    Use it when a dense checkpoint exists, and time to train on for about half of the dense training, as in the paper.
    **It starts from the weights that the module has**: load the dense checkpoint first, and call ``fit`` without
    ``ckpt_path``. Optimizer states start anew, as in the paper's language models, or go on with ``states``. Schedules start
    anew. With ``normalize=True``, a token that some expert computes first gets the dense network's output, and a token without
    an expert gets zero. **It changes the model**: checkpoints load into ``lightning_eff.apply(plain, SparseUpcycling(...))``,
    and ``export`` refuses. It logs ``networks``, their number, and means over them: ``dropped``, the fraction of tokens without
    an expert; ``load``, the largest load of an expert before tokens are dropped, divided by the mean; and ``balance``, the
    balance loss, which is ``choices`` for even loads.

    Args:
        experts: E, the number of experts. The paper uses 32. 1 is plain training.
        routing: "experts" or "tokens" choose; "auto" decides for each block.
        choices: K, the experts per token, exactly or on average. At most ``experts``.
        capacity: the room of an expert under token choice, as a multiple of its mean load.
        normalize: divide the weights of each token by their sum. The paper does so for vision models, and not for language
            models. Without it, outputs are first about ``choices / experts`` times those of the dense network.
        balance: the weight of the balance loss under token choice. 0 leaves it out.
        blocks: the blocks that get experts: "alternate" for every second one from the second on, "last" for the last half,
            or indices.
        states: the path of a checkpoint of the dense run, whose optimizer states a fit without ``ckpt_path`` goes on with. Each
            expert gets a copy of those of its network, as in the paper's vision models. None starts with new states.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no pass shows a feed-forward network in a stack of
            blocks, or which tokens a block sees; if experts would choose in causal blocks; or if code between the layers does
            not treat each token separately. On the first batch, before any weight changes, if it shows that such blocks are
            causal after all; it looks again on the 2nd, 4th, 8th batch and so on, and when a block is called with other kinds
            of arguments. In a step, if blocks are recomputed with ``use_reentrant=True`` under a balance loss.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SparseUpcycling(8)])

    References:
        Komatsuzaki et al. 2023, "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints", arXiv:2212.05055.
        Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing", arXiv:2202.09368.
        Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961 (the balance loss).
    """

    saves = "steps, compared with a larger model from scratch; costs memory for each expert"
    paper = "Komatsuzaki et al. 2023, arXiv:2212.05055"
    constraints = (
        "blocks with feed-forward networks of nn.Linear or Conv1D as modules; no pipeline or context parallelism"
    )
    search_space = SearchSpace({"experts": Choice((4, 8))}, needs_blocks)
    control = Control("the dense baseline, trained on for the same time with its learning rate decayed to zero")
    stays = "its experts are several feed-forward networks, which one does not reproduce"
    needs: ClassVar[Need] = Need.MODULE | Need.STEP
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        Part.PIPELINE: f"{UNTRIED}, and balance losses of blocks in other processes would not reach the loss",
        Part.CONTEXT: "a process has a part of each sequence, and its tokens compete for the places of experts",
    }
    change_at = Change.STRUCTURE
    neutral_at: ClassVar[Mapping[str, Any]] = {"experts": 1}
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("AutoProg", "CompoundGrowth", "ParameterSharing", "ProgressiveStacking"),
            "its blocks must have equal parameters, and only some get experts",
        ),
        **dict.fromkeys(
            ("ButterflyLinear", "LowRankLinear"), "it replaces layers of feed-forward networks by factors first"
        ),
        **dict.fromkeys(
            ("Fixup", "LayerScale", "ReZero", "SkipInit"), "it scales the layers that experts would have copies of"
        ),
        **dict.fromkeys(
            ("MaskGuidedTokens", "PartialTokenTraining", "PatchDropout", "RandomLTD", "TokenDropping", "TokenMerging"),
            "blocks get fewer tokens there, and those compete for the places of experts",
        ),
        "SequencePacking": "it joins texts in rows without padding, and the tokens of a row compete for the places of experts",
    }
    checkpointed = ("_batches", "_next")

    def __init__(
        self,
        experts: Annotated[int, Count()] = 8,
        *,
        routing: Literal["auto", "experts", "tokens"] = "auto",
        choices: Annotated[int, Count()] = 2,
        capacity: Annotated[float, Number(at_least=1)] = 1.25,
        normalize: bool = True,
        balance: Annotated[float, Number(at_least=0)] = 0.01,
        blocks: Annotated[
            str | Sequence[int], Either(OneOf("alternate", "last"), Each(Count(at_least=0), distinct=True))
        ] = "alternate",
        states: Annotated[str | os.PathLike[str] | None, FilePath("the path of a checkpoint")] = None,
    ) -> None:
        if choices > experts > 1:
            raise ValueError(
                f"{WHO}({experts=}, {choices=}): a token cannot have more experts than there are. Give choices={experts} or"
                " fewer."
            )
        self.experts, self.routing, self.choices, self.capacity = experts, routing, choices, capacity
        self.normalize, self.balance, self.blocks, self.states = normalize, balance, blocks, states
        self.needs_automatic_optimization = balance > 0 and routing != "experts"  # pyright: ignore[reportAttributeAccessIssue]

    def _reset(self) -> None:
        self._dispatches: Mapping[str, Dispatch] = {}
        self._batches, self._next = 0, 1
        self._watch: Watch | None = None
        self._seen: list[Seen] = []
        self._last: dict[str, float | int | Tensor] = {}

    @override
    def settings(self) -> dict[str, Any]:
        """The settings that decide which parameters there are, and what they compute."""
        return {name: value for name, value in super().settings().items() if name not in ("balance", "states")}

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        found = networks_of(root, surgeon.batch, who=WHO)
        if not found.networks:
            raise ValueError(
                f"{WHO}: found no feed-forward network x + W_2 f(W_1 x) in repeated blocks of {type(root).__name__}."
                f"{by_reason({**found.left, **found.others})} Remove {WHO}."
            )
        networks = [one for one in found.networks if one.index in chosen_blocks(one.length, self.blocks)]
        missing = [] if isinstance(self.blocks, str) else {*self.blocks} - {one.index for one in networks}
        if missing or not networks:
            possible = sorted({one.index for one in found.networks})
            raise ValueError(
                f"{WHO}(blocks={self.blocks!r}): {f'block {min(missing)}' if missing else 'none of these blocks'} has no"
                f" feed-forward network that can have experts; expected indices from {possible}.{by_reason(found.left)}"
                f" Give others, such as blocks={possible[-1:]}."
            )
        surgeon.leave(found.left)
        made: dict[int, tuple[LinearMap, Dispatch, str]] = {}
        routed: dict[str, int] = {}
        for one in networks:
            by = self._routing(one)
            routed[by] = routed.get(by, 0) + 1
            dispatch = Dispatch(self.experts, by, self.choices, self.capacity, self.normalize, one.sight.axis)
            dispatch.trial = True
            for i, m in enumerate(one.layers):
                place = "last" if i == len(one.layers) - 1 else "next" if i else "first"
                made[id(m.module)] = m, dispatch, place

        def build(plain: nn.Module) -> nn.Module:
            m, dispatch, place = made[id(plain)]
            weight, bias = plain.weight, plain.bias
            assert isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
            return ExpertLinear(weight, bias, self.experts, dispatch, transposed=m.transposed, place=place)

        surgeon.swap(lambda path, m: id(m) in made, build, what="a layer of a feed-forward network")
        for one in networks:
            call_layers(surgeon, one.layers[0].path)
        check_same(root, surgeon.batch, found, networks, who=WHO)
        for _, dispatch, _ in made.values():
            dispatch.trial = False
        self._count = len(networks)
        told = " and ".join(f"{count} in which {by} choose" for by, count in routed.items())
        rank_zero_info(
            f"{WHO}: {self._count} feed-forward networks have {self.experts} experts: {told}. Their weights are copies of those"
            f" that the module has now, such as {networks[0]}."
        )

    _count = 0

    def _routing(self, one: Network) -> str:
        if self.routing == "experts" and one.sight.causal:
            raise ValueError(_leaks(one.block, "as a pass shows"))
        by = self.routing if self.routing != "auto" else "tokens" if one.sight.causal else "experts"
        if by == "tokens" and self.choices == 1 and self.normalize:
            raise ValueError(
                f"{WHO}(choices=1, normalize=True): where tokens choose, a single weight divided by itself is 1, and the router"
                f" of {one.block} would get no gradient of the loss. Give choices=2 or more, or normalize=False."
            )
        return by

    # -- every step

    @override
    def attach(self, session: Session) -> None:
        session.chain.add(Stage.REWEIGHT, self._link)
        session.chain.add(Stage.SAVE, self._record, order=1)

    @override
    def on_model(self, session: Session) -> None:
        self._dispatches = dispatches(session.module)
        self._close()
        if not {Part.SHARD, Part.TENSOR} & {
            *parts_of(session.trainer.strategy)
        }:  # a look at one rank alone is right there
            self._watch = Watch(self._open(session))

    @override
    def on_optimizers(self, session: Session) -> None:
        if self.states is not None and session.trainer.ckpt_path is None:
            take_states(self.states, session.module, session.optimizers, who=WHO)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self._batches >= self._next and on_all_ranks(session, lambda: self._check(session, batch, batch_idx)):
            self._next = 2 * self._batches

    def _open(self, session: Session) -> dict[str, nn.Module]:
        """Return the blocks in which experts choose, by their paths."""
        open_to_all = {path for path, dispatch in self._dispatches.items() if dispatch.by == "experts"}
        stacks = [stack.named_blocks for stack in repeated(session.module) if stack.composite] if open_to_all else []
        return {
            block: m
            for stack in stacks
            for block, m in stack.items()
            if any(path.startswith(f"{block}.") for path in open_to_all)
        }

    def _check(self, session: Session, batch: Any, batch_idx: int) -> bool:
        """Raise ``ValueError`` if blocks in which experts choose are causal on this batch, whose mask may say so."""
        blocks = self._open(session)
        if not blocks:
            return True
        looked = Looked(blocks)
        with looked_at(session), looked.hooked():
            output = step_of(session, batch, batch_idx)
            looked.look()
        session.chain.cost.add(batch)
        self._refuse(looked.sights)
        return output is not None

    def _refuse(self, sights: Mapping[str, Sight | None]) -> None:
        """Raise ``ValueError`` if one of the blocks is causal."""
        where = f"in batch {self._batches} of this training" if self._batches > 1 else "in the first batch"
        for block, seen in sights.items():
            if seen is not None and seen.causal:
                raise ValueError(_leaks(block, where))

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _record(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Record the routing of a pass of the training step itself, and not of passes that other code runs to look at it."""
        if not torch.is_grad_enabled():
            return proceed(batch)
        for dispatch in self._dispatches.values():
            dispatch.seen = self._seen
        if self._watch is not None:
            self._watch.on = True
        try:
            return proceed(batch)
        finally:
            if self._watch is not None:
                self._watch.on = False
            for dispatch in self._dispatches.values():
                dispatch.seen = None

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._seen = []
        try:
            output = proceed(batch)
        finally:
            seen, self._seen = self._seen, []
        if self._watch is not None:
            self._refuse(self._watch.sights())
        if not seen:
            return output
        self._last = {
            "dropped": torch.stack([one.dropped for one in seen]).mean(),
            "load": torch.stack([one.load for one in seen]).mean(),
        }
        losses = [one.balance for one in seen if one.balance is not None]
        if losses:
            self._last["balance"] = torch.stack([t.detach() for t in losses]).mean()
        loss = loss_of(output)
        if not losses or not self.balance or loss is None or not loss.requires_grad:
            return output
        if not all(t.requires_grad for t in losses):
            raise ValueError(
                f"{WHO}: a feed-forward network ran without a graph, as under gradient checkpointing with use_reentrant=True,"
                " so its balance loss would have no gradient. Set use_reentrant=False in checkpoint, or balance=0."
            )
        whole = loss + self.balance * torch.stack(losses).sum().to(loss.dtype)
        return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    # -- reports

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("_dispatches", "_watch")}

    @override
    def detach(self, session: Session) -> None:
        self._dispatches = {}
        self._close()
        super().detach(session)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"networks": self._count, **self._last}

    @override
    def summary(self) -> str:
        return f"trained {self._count} mixtures of experts" if self._count else "the module already had its experts"


def _leaks(block: str, where: str) -> str:
    return (
        f"{WHO}: the block {block} is causal {where}, and experts that choose among all tokens would let its outputs depend on"
        " later ones. Set routing='tokens'."
    )
