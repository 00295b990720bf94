"""Gradual drop-in: add new blocks unit by unit (DropIn, Smith et al. 2016)."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Layers
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth._sizes.depth import blocks_of
from lightning_eff.model.growth._untrained import Growing, note


def passed_share(u: float, *, start: float, end: float) -> float:
    """``p = (u - start) / (end - start)``, 0 before ``start`` and 1 after ``end``."""
    return min(max((u - start) / (end - start), 0.0), 1.0)


def drop_in(entered: Tensor, left: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """Take each unit from ``left`` with probability ``p``, and otherwise from ``entered``; or return the mean.

    Args:
        entered: the block's input ``h``, of any shape.
        left: the block's output ``f(h)``, of the same shape.
        p: in [0, 1].
        generator: on their device; None for the mean, ``(1 - p) h + p f(h)``.
    """
    dtype = torch.promote_types(entered.dtype, left.dtype)
    h, f = entered.to(dtype), left.to(dtype)
    if generator is None:
        return torch.lerp(h, f, p)
    return torch.where(torch.rand(h.shape, generator=generator, device=h.device, dtype=torch.float32) < p, f, h)


def _first(count: int, num_blocks: int) -> int:
    return min(count, num_blocks)


def _shallow(technique: "DropIn") -> dict[str, Callback]:
    """Make the control run: the shallow network throughout."""
    if technique.neutral:
        return {}
    kept = functools.partial(_first, technique.first)
    return {"the first blocks throughout": Shallower(kept=kept, layers=technique.layers)}


def _shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Make the technique with ``first`` given as a fraction of the blocks, and ``ramp`` as a fraction of the run after
    ``start``.
    """
    first = max(round(values["first"] * profile.num_blocks), 1)
    start = values["start"]
    return cls(first=first, start=start, end=start + values["ramp"] * (1.0 - start))


class DropIn(Growing):
    """Train a shallow network first, then mix in the remaining blocks unit by unit until the network is deep.

    Before ``start`` only the first ``first`` blocks run. After that all blocks run. Each unit of a new block's output
    (each number of the hidden state, for each sample) is passed on with probability ``p``; otherwise the block's input
    is passed on. ``p`` rises linearly from 0 to 1 at ``end``, and from then on the network is the plain one. Each
    micro-batch and each rank has its own draw. Validation, test and prediction under this callback use the mean
    instead, ``(1 - p) h + p f(h)``.

    Use it for networks that are too deep to train from the start. It saves compute only before ``start``: while new
    blocks are mixed in, every block runs in full.

    The module is built at its full depth and keeps it. New blocks start from their own initial weights. Before
    ``start`` they cost no compute, no activation memory, no gradient and no optimizer state. If a run ends before
    ``end``, or a checkpoint is saved before it, the plain module computes something else than was trained. A warning
    and a note in the checkpoint say so.

    Logged: ``p``, and ``layers_active``, the number of blocks that run.

    Args:
        first: the number of blocks of the shallow network.
        start: the fraction of the budget at which new blocks begin to be mixed in.
        end: the fraction of the budget at which the network is the plain one. It must be above ``start``; both 0 is
            plain training.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if the module has fewer than ``first`` blocks, or they lie
            within a compiled module. At the first step with a new block, if it changes the shape of the hidden state.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[DropIn(first=6, start=0.1, end=0.5)])

    References:
        Smith et al. 2016, "Gradual DropIn of Layers to Train Very Deep Neural Networks", CVPR, arXiv:1511.06951.
    """

    saves = "compute, activation memory and optimizer memory of the new blocks until they are mixed in"
    paper = "Smith et al. 2016 (CVPR), arXiv:1511.06951"
    constraints = "blocks that keep the shape of the hidden state"
    search_space = SearchSpace(
        {"first": Choice((0.25, 0.5)), "start": Uniform(0.0, 0.4), "ramp": Uniform(0.2, 0.6)}, needs_blocks, _shares
    )
    control = Control("the shallow network throughout", _shallow)
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "Shallower"),
        "both set how many blocks run",
    )
    needs_automatic_optimization: ClassVar[bool] = False
    neutral_at: ClassVar[Mapping[str, Any]] = {"end": 0.0}

    def __init__(
        self,
        *,
        first: Annotated[int, Count()] = 6,
        start: Annotated[float, Fraction(below=1)] = 0.1,
        end: Annotated[float, Fraction()] = 0.5,
        layers: Layers | None = None,
    ) -> None:
        if not (start < end or start == end == 0.0):
            raise ValueError(
                f"DropIn(start={start}, end={end}): start must be below end. The defaults are 0.1 and 0.5; both 0 is plain"
                " training."
            )
        self.first = first
        self.start = start
        self.end = end
        self.layers = layers

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._p = 0.0
        self._batch: tuple[int, ...] = ()
        self._ran = self._told = False
        self._where = ""

    # -- set-up

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting and (self._learnt is None or self._p == 1.0):
            return
        stack = blocks_of(session, self.layers, who="DropIn", copies=False)
        if self.first > len(stack):
            raise ValueError(
                f"DropIn(first={self.first}): {stack} has only {len(stack)} blocks. Use first={max(len(stack) // 2, 1)}, or"
                " build the module at its final depth."
            )
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
        if self.first == len(stack) and session.fitting:
            session.rest(self)  # there is no new block
            return
        if session.fitting:
            self._stack, self._where = stack, f"{len(stack)} blocks of {stack.path!r}"
        stack.active = len(stack) if self._p else self.first
        stack.watch(scales=True, who=type(self).__name__)
        stack.freeze_inactive()
        stack.mixes[self.name()] = functools.partial(self._mix, session)
        if not session.fitting:
            rank_zero_info(f"DropIn: running {stack.active} of {stack}, with the new blocks mixed in at {self._p:.1%}.")

    # -- the course of the run

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        stack = self._stack
        assert stack is not None, "on_model has found the blocks"
        self._ran = True
        self._batch = (session.trainer.global_step, batch_idx, session.rank)
        if batch_idx % session.trainer.accumulate_grad_batches:
            return
        self._p = max(self._p, passed_share(session.progress.u, start=self.start, end=self.end))
        if self._p and stack.active < len(stack):
            stack.active = len(stack)
            stack.freeze_inactive()
            session.rewrap()
            session.blocks_changed(self)

    def _mix(self, session: Session, index: int, entered: Tensor, left: Tensor, training: bool) -> Tensor:
        """Mix a new block's output with its input; the same units if a step runs the block again."""
        if index < self.first or self._p == 1.0:
            return left
        if not training:
            return drop_in(entered, left, self._p, None)
        seed = session.generator(self.name(), *self._batch, index).initial_seed()
        return drop_in(entered, left, self._p, torch.Generator(entered.device).manual_seed(seed))

    # -- state and report

    @override
    def short(self) -> str | None:
        """Describe a module whose new blocks are only partly mixed in; None for any other."""
        stack = self.stack_state()
        if stack is None or self._p == 1.0:
            return None
        if self._p == 0.0:
            return note("DropIn", self.first, stack["length"], self._where)
        return (
            f"DropIn: of {self._where or 'the blocks'}, those after the first {self.first} are mixed in at {self._p:.1%}."
            " Without DropIn in the Trainer, the module uses them in full, and computes something else than was trained and"
            " validated"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self.stack_state()
        if stack is None:
            return {}
        state, short = {"p": self._p, "stack": stack}, self.short()
        return state if short is None else {**state, "note": short}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._p, self._learnt = state_dict["p"], state_dict["stack"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        if self._stack is None and self._learnt is None:
            return {}
        length = len(self._stack) if self._stack is not None else (self._learnt or {})["length"]
        return {"p": self._p, "layers_active": length if self._p else self.first}

    @override
    def summary(self) -> str:
        return f"{self.first} of {self._where} at first; the others mixed in at {self._p:.1%} at the end"
