"""ResIST: each rank trains some of the residual blocks for a while, and ranks meet block by block (Dun et al. 2021)."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._stack.unused_parameters import look_for_unused, refuse_reentrant, refuse_static_graph
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
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
    """Which of the blocks each rank holds in a round.

    They are shuffled and dealt in turn, so that each has a holder and ranks hold equally many, but for one; a rank with fewer
    than ``least`` takes others at random.

    Args:
        blocks: by number.
        num_ranks: S, how many sub-networks there are.
        least: blocks of a rank, if there are as many.
        generator: what is drawn from.
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
    """``w <- 1 / |H| sum_{i in H} w_i`` in place, on all ranks, with ``H`` the ranks that hold ``w``.

    Args:
        parameters: by name, the same on all ranks.
        holders: the ranks that hold each, one at least.
        rank: this one.
    """
    for kind in {(p.dtype, p.device): None for p in parameters.values()}:
        own = {name: p for name, p in parameters.items() if (p.dtype, p.device) == kind}
        flat = torch.cat([(p if rank in holders[n] else torch.zeros_like(p)).flatten() for n, p in own.items()])
        dist.all_reduce(flat)
        for (name, p), total in zip(own.items(), flat.split([p.numel() for p in own.values()]), strict=True):
            p.copy_(total.view_as(p) / len(holders[name]))


class ResIST(Apart):
    """Under DDP, let each rank run a random part of the blocks for ``interval`` steps, and average each block over its holders.

    The first ``warmup_steps`` steps are plain DDP, with all blocks. Then rounds follow: blocks are shuffled and dealt to the
    ranks, so that each has a holder; a rank passes over all others, and trains its shallow network by its own gradients and
    its own optimizer. After ``interval`` steps each block is the mean over the ranks that held it, and all else, which every
    rank holds, is the mean over all of them. Weights and momenta of a block that a rank does not hold stay as they are there,
    and a rank that a block is dealt to begins with no momenta of it; the paper begins each round with a new optimizer.

    A step then costs a rank its own blocks and no exchange of gradients. **A meeting sends as many bytes as one of
    :class:`LocalSGD`'s**: where a block has one holder, the others send zeros for it. The paper sends fewer. Each rank has
    memory for all blocks.

    With ``scaled``, the branch of a block counts ``S / |H|`` times in training, for S ranks of which |H| hold it, so that the
    whole network of validation and checkpoints is right as it is; the paper scales branches by 1 / S where it is evaluated,
    which a plain module does not.

    While the trainer validates, and after the fit, the module holds the means; so does every checkpoint's ``state_dict``,
    which loads into the plain module. Each rank's own weights and optimizer state are in the callback's state, so that
    resuming with as many ranks is bit for bit the undisturbed run, in mid-round too. BatchNorm's statistics are rank 0's, as
    in DDP, of the rounds in which it holds the block. On one process it is plain training. Under DDP,
    ``find_unused_parameters`` is switched on. Blocks that change the hidden state's shape, and the first one of a stack whose
    blocks hand other tensors on, are held by all.

    Logged: ``local_steps``, ``averagings``, ``blocks`` (that this rank holds).

    Args:
        interval: steps of a round, >= 1. 50 is the paper's.
        warmup_steps: steps of plain DDP at the start of the run, >= 1; ``math.inf`` is plain DDP for ever.
        least: blocks that each rank holds at least, >= 1; some then have several holders.
        scaled: whether branches count for the blocks that are passed over.
        layers: the blocks, as a path, a pattern or a list of paths; None for the longest.

    Raises:
        ValueError: if an argument is out of range; at setup, without a stack of blocks, with a communication hook, a static
            graph or reentrant checkpointing under DDP, or with a gradient scaler, whose ranks would skip different steps.

    Sources:
        Dun et al. 2021, arXiv:2107.00961.
    """

    saves = "communication, and the time of the blocks that a rank does not hold"
    paper = "Dun et al. 2021, arXiv:2107.00961"
    constraints = "residual blocks, best pre-norm; DDP; checkpoints up to N ranks as large; no fp16 scaler"
    survey: ClassVar[Survey | None] = Survey("ResIST", zhuang="2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"interval": Choice((8, 25, 50, 100))}, needs_processes)
    control = Control(
        "LocalSGD with the same interval: ranks train the whole network between meetings; and the baseline under DDP for as"
        " many seconds"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            _AVERAGES, "the average would be of each rank's own weights, and rank 0's alone would be saved"
        ),
        **dict.fromkeys(_CURVATURE, "each rank steps along a gradient of its own, through blocks of its own"),
        **dict.fromkeys(_GROWTH, "the blocks that rounds deal out would change within them"),
        **dict.fromkeys(("StochasticDepth", "ProgressiveLayerDropping"), "both say which blocks a step passes over"),
        "LocalSGD": "both say when ranks meet",
    }

    def __init__(
        self,
        interval: int = 50,
        *,
        warmup_steps: int | float = 1,
        least: int = 1,
        scaled: bool = True,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ValueError(f"{WHO}({least=}): expected blocks that each rank holds at least, an integer >= 1.")
        if not isinstance(scaled, bool):
            raise ValueError(f"{WHO}({scaled=}): expected True or False.")
        self.least, self.scaled, self.layers = least, scaled, layers
        self._take(interval, warmup_steps, first=1)

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
                f"{WHO}: DDP runs with find_unused_parameters=True, for the blocks that a rank does not hold."
            )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stack = self._stack = session.stack(self.layers, who=WHO)
        refuse_compiled_around(session.module, stack.path, who=WHO)
        if len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"{WHO}: {stack} holds the same block several times; expected different ones, of which each is dealt by itself."
                " Name another stack by layers=, or take the technique out."
            )
        refuse_reentrant(session, [stack], who=WHO)
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
        stack.watch(scales=True, reshaping=True)

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
        """The blocks that each rank holds in this round."""
        stack = self._stack
        assert stack is not None, "on_model has found the blocks"
        always = set(stack.reshapes) | ({0} if stack.carries is not False else set())
        rest = [i for i in range(len(stack)) if i not in always]
        if not rest:
            raise ValueError(
                f"{WHO}: no block of {stack} can be passed over, since each returns another shape than it is given, or what"
                " others need; expected some that can. Name another stack by layers=, or take the technique out."
            )
        dealt = deal(rest, session.trainer.world_size, self.least, session.generator(WHO, number))
        return [one | always for one in dealt]

    def _round(self, session: Session) -> list[frozenset[int]] | None:
        """The blocks that each rank holds; None while all hold all."""
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
        """A round begins: what this rank did not hold in the one before has no momenta."""
        number = self.local_steps // self.interval
        if number == 0:
            return
        before = self._dealt(session, number - 1)
        for name, p in session.module.named_parameters():
            if name in self._inside and session.rank not in self._holders(session, before, name):
                for optimizer in session.optimizers:
                    optimizer.state.pop(p, None)

    def _leave(self, session: Session) -> None:
        """What this rank does not hold is not stepped, whatever DDP has made of its gradients."""
        if self._distributed and session.trainer.world_size > 1 and not self._steps:
            self._dealt(session, 0)  # before any weight has moved: whether there is something to deal out
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

    # -- what is told and kept

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
            f"{self.local_steps} of {self._steps} steps were made apart, each rank with some of the blocks, and ranks met"
            f" {self._averagings} times since"
        )
