"""ResIST: each rank trains some of the residual blocks for a while, and ranks meet block by block (Dun et al. 2021)."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Layers, OneOf
from lightning_eff._core._stack.unused_parameters import look_for_unused, refuse_reentrant, refuse_static_graph
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, Control
from lightning_eff.strategies._communication.apart import Apart

WHO = "ResIST"
_AVERAGES = (
    "ExponentialMovingAverage",
    "LatestWeightAveraging",
    "Lookahead",
    "MESA",
    "RegularizedNonlinearAcceleration",
    "ScheduleFree",
    "StochasticWeightAveraging",
    "TrainableWeightAveraging",
)
_CURVATURE = ("KFAC", "MFAC", "SampledQuasiNewton")
_GROWTH = ("AutoProg", "CompoundGrowth", "DropIn", "GreedyLayerwise", "ProgressiveStacking", "ShallowToDeep")


def deal(blocks: list[int], num_ranks: int, least: int, generator: Generator) -> list[frozenset[int]]:
    """Draw the blocks that each rank holds in a round.

    The blocks are shuffled and assigned to the ranks in turn. So each block has a holder, and the ranks' numbers of blocks
    differ by at most one. A rank with fewer than ``least`` blocks takes further ones at random.

    Args:
        blocks: the indices of the blocks.
        num_ranks: S, the number of sub-networks.
        least: the minimum number of blocks per rank, if there are that many.
        generator: the source of randomness.
    """
    order = torch.randperm(len(blocks), generator=generator).tolist()
    held: list[frozenset[int]] = []
    for rank in range(num_ranks):
        own = order[rank::num_ranks]
        more = [i for i in torch.randperm(len(blocks), generator=generator).tolist() if i not in own]
        held.append(frozenset(blocks[i] for i in own + more[: max(least - len(own), 0)]))
    return held


@torch.no_grad()
def average_over_holders(parameters: Mapping[str, Parameter], holders: Mapping[str, frozenset[int]], rank: int) -> None:
    """Compute ``w <- 1 / |H| sum_{i in H} w_i`` in place on all ranks, where ``H`` are the ranks that hold ``w``.

    Args:
        parameters: the parameters by name, the same on all ranks.
        holders: the ranks that hold each parameter, at least one.
        rank: this rank.
    """
    for kind in {(p.dtype, p.device): None for p in parameters.values()}:
        own = {name: p for name, p in parameters.items() if (p.dtype, p.device) == kind}
        flat = torch.cat([(p if rank in holders[n] else torch.zeros_like(p)).flatten() for n, p in own.items()])
        dist.all_reduce(flat)
        for (name, p), total in zip(own.items(), flat.split([p.numel() for p in own.values()]), strict=True):
            p.copy_(total.view_as(p) / len(holders[name]))


class ResIST(Apart):
    """Train a random part of the residual blocks on each DDP rank, and average each block over the ranks that hold it.

    The first ``warmup_steps`` steps are plain DDP with all blocks. Rounds of ``interval`` steps follow. In each round the
    blocks are shuffled and assigned to the ranks, so that each block has at least one holder. A rank skips all other
    blocks and trains its shallow network with its own gradients and its own optimizer. At the end of a round, each block
    becomes the mean over the ranks that held it. Everything outside the blocks becomes the mean over all ranks.

    Use it for deep residual networks, preferably pre-norm, where steps wait for the network. A step costs a rank only its
    own blocks, and no gradients are exchanged. **One averaging sends as many bytes as in** :class:`LocalSGD`: ranks that
    do not hold a block send zeros for it. The paper sends fewer. Each rank keeps all blocks in memory.

    With ``scaled``, the residual branch of a block counts ``S / |H|`` times in training, where S is the number of ranks
    and |H| the number that hold the block. The whole network can then be validated and saved as it is. The paper instead
    scales branches by 1 / S in evaluation, which a plain module does not do. A rank that receives a block starts with no
    momenta for it. The paper starts each round with a new optimizer.

    The module holds the means during validation and after the fit, and so does every checkpoint's ``state_dict``, which
    loads into the plain module. The callback's state holds each rank's weights and optimizer state. Resuming with the same
    number of ranks is bit for bit the uninterrupted run, also in the middle of a round.

    BatchNorm statistics are those of rank 0, as in DDP, from the rounds in which it holds the block. On one process this
    is plain training. DDP's ``find_unused_parameters`` is switched on. All ranks hold the blocks that change the shape of
    the hidden state, and the first block of a stack whose blocks return further tensors. The callback logs
    ``local_steps``, ``averagings`` and ``blocks`` (the number that this rank holds).

    Args:
        interval: the number of steps in a round. 50 is the paper's.
        warmup_steps: the number of plain DDP steps at the start of the run. ``math.inf`` is plain DDP throughout.
        least: the minimum number of blocks that each rank holds. With a larger number, some blocks have several holders.
        scaled: whether to scale residual branches up for the ranks that skip them.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, without a stack of blocks, with a communication hook, a static
            graph or reentrant checkpointing under DDP, or with a gradient scaler, because ranks would skip different
            steps.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ResIST(interval=50, warmup_steps=1000)])

    References:
        Dun et al. 2021, "ResIST: Layer-Wise Decomposition of ResNets for Distributed Training", arXiv:2107.00961.
    """

    saves = "communication, and the computation of the blocks that a rank does not hold"
    paper = "Dun et al. 2021, arXiv:2107.00961"
    constraints = (
        "residual blocks, preferably pre-norm; DDP; checkpoints up to N times as large for N ranks; no fp16 scaler"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"interval": Choice((8, 25, 50, 100))}, needs_processes)
    control = Control(
        "LocalSGD with the same interval, which trains the whole network between averagings; and the baseline under DDP for"
        " the same time"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            _AVERAGES, "it would average each rank's own weights, and only the average of rank 0 would be saved"
        ),
        **dict.fromkeys(_CURVATURE, "each rank computes its gradient through different blocks"),
        **dict.fromkeys(_GROWTH, "it would change the blocks within a round"),
        **dict.fromkeys(("StochasticDepth", "ProgressiveLayerDropping"), "both choose the blocks that a step skips"),
        **dict.fromkeys(LOCAL_STEPS, "both decide when ranks average their weights"),
    }

    def __init__(
        self,
        interval: Annotated[int, Count()] = 50,
        *,
        warmup_steps: Annotated[int | float, Either(Count(), OneOf(math.inf))] = 1,
        least: Annotated[int, Count()] = 1,
        scaled: bool = True,
        layers: Layers | None = None,
    ) -> None:
        self.least, self.scaled, self.layers = least, scaled, layers
        self._take(interval, warmup_steps)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._inside: dict[str, set[int]] = {}  # by parameter, the blocks that it is of, if of nothing else
        self._blocks = 0

    # -- the run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        refuse_static_graph(session, who=WHO)

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        if look_for_unused(session):
            rank_zero_info(
                f"{WHO}: DDP runs with find_unused_parameters=True, because each rank skips the blocks it does not hold."
            )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stack = self._stack = session.stack(self.layers, who=WHO)
        refuse_compiled_around(session.module, stack.path, who=WHO)
        if len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"{WHO}: {stack} holds the same block several times, so its blocks cannot be assigned one by one. Name another"
                f" stack by layers=, or remove {WHO}."
            )
        refuse_reentrant(session, [stack], who=WHO)
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
        stack.watch(scales=True, reshaping=True, who=WHO)

    @override
    def on_optimizers(self, session: Session) -> None:
        self._inside = self._owned(session)
        super().on_optimizers(session)
        module = session.module
        clip = module.configure_gradient_clipping

        @functools.wraps(clip)
        def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._leave(session)
            clip(optimizer, *args, **kwargs)

        session.patches.set(module, "configure_gradient_clipping", configure_gradient_clipping)

    def _owned(self, session: Session) -> dict[str, set[int]]:
        assert self._stack is not None, "on_model has found the blocks"
        owners: dict[int, set[int]] = {}
        for index, block in enumerate(self._stack.blocks):
            for p in block.parameters():
                owners.setdefault(id(p), set()).add(index)
        parts = {id(m) for block in self._stack.blocks for m in block.modules()}
        outside = {id(p) for m in session.module.modules() if id(m) not in parts for p in m._parameters.values()}
        named = session.module.named_parameters()
        return {name: owners[id(p)] for name, p in named if id(p) in owners and id(p) not in outside}

    def _dealt(self, session: Session, number: int) -> list[frozenset[int]]:
        """Return the blocks that each rank holds in this round."""
        stack = self._stack
        assert stack is not None, "on_model has found the blocks"
        always = set(stack.reshapes) | ({0} if stack.carries is not False else set())
        rest = [i for i in range(len(stack)) if i not in always]
        if not rest:
            raise ValueError(
                f"{WHO}: no block of {stack} can be skipped, because each one changes the shape of its input or returns tensors"
                f" that later blocks need. Name another stack by layers=, or remove {WHO}."
            )
        dealt = deal(rest, session.trainer.world_size, self.least, session.generator(WHO, number))
        return [one | always for one in dealt]

    def _round(self, session: Session) -> list[frozenset[int]] | None:
        """Return the blocks that each rank holds; None while every rank holds all of them."""
        if not self._distributed or session.trainer.world_size == 1 or self._steps < self.warmup_steps:
            return None
        return self._dealt(session, self.local_steps // self.interval)

    def _holders(self, session: Session, dealt: list[frozenset[int]], name: str) -> frozenset[int]:
        blocks = self._inside.get(name)
        return frozenset(rank for rank, held in enumerate(dealt) if blocks is None or blocks & held)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        stack, dealt = self._stack, self._round(session)
        assert stack is not None, "on_model has found the blocks"
        if dealt is None:
            stack.dropped, stack.keep, self._blocks = frozenset(), [], len(stack)
            return
        own = dealt[session.rank]
        stack.dropped, self._blocks = frozenset(range(len(stack))) - own, len(own)
        shares = [sum(i in held for held in dealt) / len(dealt) for i in range(len(stack))]
        stack.keep = shares if self.scaled else []
        if self.local_steps % self.interval == 0:
            self._begin(session, dealt)

    def _begin(self, session: Session, dealt: list[frozenset[int]]) -> None:
        """Begin a round: drop the momenta of the blocks that this rank did not hold in the round before."""
        number = self.local_steps // self.interval
        if number == 0:
            return
        before = self._dealt(session, number - 1)
        for name, p in session.module.named_parameters():
            if name in self._inside and session.rank not in self._holders(session, before, name):
                for optimizer in session.optimizers:
                    optimizer.state.pop(p, None)

    def _leave(self, session: Session) -> None:
        """Clear the gradients of blocks that this rank does not hold, whatever DDP has put there."""
        if self._distributed and session.trainer.world_size > 1 and not self._steps:
            self._dealt(session, 0)  # fails before any weight changes if no block can be skipped
        dealt = self._round(session)
        for name, p in session.module.named_parameters() if dealt is not None else ():
            if name in self._inside and session.rank not in self._holders(session, dealt or [], name):
                p.grad = None

    @override
    def mean(self, session: Session, parameters: dict[str, Parameter]) -> None:
        step = self.local_steps
        if session.trainer.world_size == 1 or step == 0:
            return super().mean(session, parameters)
        dealt = self._dealt(session, (step - 1) // self.interval)
        holders = {name: self._holders(session, dealt, name) for name in parameters}
        average_over_holders(parameters, holders, session.rank)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        if self._stack is not None:
            self._learnt, self._stack = self._stack.state_dict(), None

    # -- reports and state

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stack": self._stack.state_dict() if self._stack is not None else self._learnt}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._pending is not None:
            self._learnt = state_dict["stack"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "blocks": self._blocks}

    @override
    def summary(self) -> str:
        return (
            f"{self.local_steps} of {self._steps} steps were local, each rank with a part of the blocks, with"
            f" {self._averagings} averagings"
        )
