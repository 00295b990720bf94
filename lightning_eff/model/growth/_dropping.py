"""The base of techniques that skip blocks at random in training."""

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._stack.unused_parameters import look_for_unused, refuse_reentrant, refuse_static_graph
from lightning_eff._core._stack.walking import parameters_of
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from lightning_eff.model.growth._sizes.depth import check_distinct


def keep_probabilities(theta: float, *, num_blocks: int) -> list[float]:
    """Return ``p_i = 1 - (i / L) (1 - theta)`` for the blocks i = 1 .. L."""
    return [1.0 - i / num_blocks * (1.0 - theta) for i in range(1, num_blocks + 1)]


def draw(keep: list[float], generator: Generator) -> frozenset[int]:
    """Return the blocks to drop, from 0: each independently, with probability ``1 - p_i``."""
    # one number for each block, whatever its p
    numbers = torch.rand(len(keep), generator=generator, dtype=torch.float32).tolist()
    return frozenset(index for index, (number, p) in enumerate(zip(numbers, keep, strict=True)) if number >= p)


def at_least_one(keep: list[float], dropped: frozenset[int]) -> tuple[list[float], frozenset[int]]:
    """Return the probabilities and the draw if the likeliest block, the first such, is kept where all were drawn.

    Its probability becomes ``p + prod_i (1 - p_i)``. A network of no block may not run: it may have a loss of all routers.

    Args:
        keep: the probabilities ``p_i`` of :func:`draw`.
        dropped: what it drew.
    """
    nothing = math.prod(1.0 - p for p in keep)
    if nothing == 0.0:
        return keep, dropped
    first = keep.index(max(keep))
    likely = [*keep[:first], keep[first] + nothing, *keep[first + 1 :]]
    return likely, dropped - {first} if len(dropped) == len(keep) else dropped


class Dropping(Technique):
    """Keeps each block with a probability, drawn per optimizer step; the residual branch of a kept block is scaled by
    ``1/p``. At least one block runs in every step.

    A subclass says where the blocks are (:meth:`find`) and how likely each is kept (:meth:`probabilities`).
    """

    needs: ClassVar[Need] = Need.BLOCKS
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    reshaping: ClassVar[bool] = False  # blocks that return another shape are kept; otherwise they are refused

    def _reset(self) -> None:
        self._stacks: list[BlockStack] = []
        self._learnt: list[dict[str, Any]] = []
        self._drawn: list[
            tuple[list[float], list[int]]
        ] = []  # in the accumulation window in which a checkpoint was saved
        self._needed: tuple[int, int] | None = None
        self._outside: nn.Parameter | None = None  # one outside of the blocks that trained when it was last looked for
        self._dropped = 0
        self._passes, self._passed_over = 0, 0
        self._where = ""

    @abstractmethod
    def find(self, session: Session) -> list[BlockStack]:
        """Return the stacks whose blocks may be dropped, in the order in which they run."""

    @abstractmethod
    def probabilities(self, session: Session, num_blocks: int) -> list[float]:
        """Return the probability in (0, 1] with which each of ``num_blocks`` blocks, over all stacks, is kept at this
        step.
        """

    @property
    def skips(self) -> bool:
        """Whether a dropped block does no work: one draw then holds for all samples, micro-batches and ranks."""
        return True

    @property
    @override
    def drops_blocks(self) -> bool:
        return self.skips and not self.neutral

    @override
    def check(self, session: Session) -> None:
        if self.skips:
            refuse_static_graph(session, who=type(self).__name__)

    @override
    def attach(self, session: Session) -> None:
        if self.skips and look_for_unused(session):
            rank_zero_info(
                f"{type(self).__name__}: switched on find_unused_parameters of DDP, because of the dropped blocks."
            )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        who = type(self).__name__
        stacks = self._stacks = self.find(session)
        blocks = [block for stack in stacks for block in stack.blocks]

        for stack in stacks:
            refuse_compiled_around(session.module, stack.path, who=who)
        check_distinct(stacks, who=who, why="each block is kept with its own probability")
        if self.skips:
            refuse_reentrant(session, stacks, who=who)
        self._take_up()
        self._where = f"{len(blocks)} blocks of {', '.join(repr(stack.path) for stack in stacks)}"
        for stack in stacks:
            stack.watch(scales=True, reshaping=self.reshaping, skips=self.skips, who=who)
        self._needed = self._look_for_needed(session)  # before a pipeline lets go of parameters

    def _take_up(self) -> None:
        """Take over what a checkpoint knows about the blocks' output."""
        if len(self._learnt) == len(self._stacks):
            for stack, learnt in zip(self._stacks, self._learnt, strict=True):
                stack.load_state_dict(learnt)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        drawn, self._drawn = self._drawn, []
        if batch_idx % session.trainer.accumulate_grad_batches == 0:
            self._draw(session)
        elif [len(keep) for keep, _ in drawn] == [stack.active for stack in self._stacks]:  # resumed within a window
            for stack, (keep, dropped) in zip(self._stacks, drawn, strict=True):
                stack.keep, stack.dropped = list(keep), frozenset(dropped)
            self._dropped = sum(len(stack.dropped) for stack in self._stacks)
        elif not all(stack.keep for stack in self._stacks):
            self._draw(session)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._outside = None
        self._draw(session)

    def _draw(self, session: Session) -> None:
        """Draw for this optimizer step; the same numbers on all ranks, and at every call within the step."""
        assert self._stacks, "on_model has found the blocks"
        keep = self.probabilities(session, sum(stack.active for stack in self._stacks))
        numbers = session.generator(self.name(), session.trainer.global_step)
        needed = self._needed if session.divided else self._look_for_needed(session)
        at, drawn = 0, frozenset[int]()
        for i, stack in enumerate(self._stacks):
            stack.keep, at = keep[at : at + stack.active], at + stack.active
            if stack.carries is None:  # no block has run yet, so what a dropped one must return is unknown
                stack.keep = [1.0] * stack.active
            elif stack.carries:
                stack.keep[0] = 1.0
            if needed is not None and needed[0] == i:
                stack.keep[needed[1]] = 1.0
            for index in stack.reshapes:
                stack.keep[index : index + 1] = [1.0] * (index < stack.active)
            drawn |= {at - stack.active + index for index in draw(stack.keep, numbers)}
        every, drawn = at_least_one([p for stack in self._stacks for p in stack.keep], drawn)
        at = 0
        for stack in self._stacks:
            stack.keep = every[at : at + stack.active]
            stack.dropped = frozenset(index for index in range(stack.active) if at + index in drawn)
            at += stack.active
        self._dropped = sum(len(stack.dropped) for stack in self._stacks)
        if all(len(stack.reshapes) == len(stack) for stack in self._stacks):
            raise ValueError(
                f"{type(self).__name__}: every block of {self._where} changes the shape of the hidden state, so none can be"
                f" skipped. Name other stacks by layers=, or remove {type(self).__name__}."
            )

    def _look_for_needed(self, session: Session) -> tuple[int, int] | None:
        """Return the stack and the block that must run for any parameter to get a gradient, where only blocks train."""
        outside = self._outside
        if outside is not None and outside.requires_grad:  # still trains: no walk in this step
            return None
        blocks = [(i, j, block) for i, stack in enumerate(self._stacks) for j, block in enumerate(stack.blocks)]
        inside = {id(p) for _, _, block in blocks for p in block.parameters()}
        trained = (p for p in parameters_of(session.module) if p.requires_grad and id(p) not in inside)
        self._outside = next(trained, None)
        if self._outside is not None:
            return None
        active = [(i, j, block) for i, j, block in blocks if j < self._stacks[i].active]
        return next(((i, j) for i, j, block in active if any(p.requires_grad for p in block.parameters())), None)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._passes += sum(stack.active for stack in self._stacks)
        self._passed_over += self._dropped

    @override
    def detach(self, session: Session) -> None:
        self._outside = None
        if self._stacks:
            self._learnt, self._stacks = [stack.state_dict() for stack in self._stacks], []

    @override
    def state_dict(self) -> dict[str, Any]:
        stacks = [stack.state_dict() for stack in self._stacks] or self._learnt
        drawn = [(list(stack.keep), sorted(stack.dropped)) for stack in self._stacks]
        return {"passes": self._passes, "passed_over": self._passed_over, "stacks": stacks, "drawn": drawn}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._passes, self._passed_over = state_dict["passes"], state_dict["passed_over"]
        self._drawn = [(keep, dropped) for keep, dropped in state_dict.get("drawn", [])]
        once = state_dict.get("stack")  # of checkpoints of earlier versions
        self._learnt = state_dict.get("stacks", [] if once is None else [once])
        self._take_up()  # strategies that divide the module load checkpoints after the blocks are found
