"""Gradual drop-in: new blocks come in unit by unit (DropIn, Smith et al. 2016)."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth._sizes.depth import blocks_of, check_length
from lightning_eff.model.growth._untrained import Growing, note


def passed_share(u: float, *, start: float, end: float) -> float:
    """``p = (u - start) / (end - start)``, 0 before ``start`` and 1 after ``end``."""
    return min(max((u - start) / (end - start), 0.0), 1.0)


def drop_in(entered: Tensor, left: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """Each unit of ``left`` with probability ``p``, else that of ``entered``: ``f(h)`` or ``h``; or their mean.

    Args:
        entered: ``h``, what the block was given, of any shape.
        left: ``f(h)``, what it returned, of that shape.
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
    """The shallow network throughout."""
    if technique.neutral:
        return {}
    kept = functools.partial(_first, technique.first)
    return {"the first blocks throughout": Shallower(kept=kept, layers=technique.layers)}


def _shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """``first`` as a share of all blocks, ``end`` as that of what follows ``start``."""
    first = max(round(values["first"] * profile.num_blocks), 1)
    start = values["start"]
    return cls(first=first, start=start, end=start + values["ramp"] * (1.0 - start))


class DropIn(Growing):
    """Train a shallow network, and let its other blocks come in unit by unit, until the network is deep.

    Before ``start`` the first ``first`` blocks run alone. From then on all run, and of each new block's output every unit
    (each number of the hidden state, for each sample) is passed on with probability ``p``, and else that which the block was
    given; ``p`` rises linearly from 0 to 1 at ``end``, from where on the network is the plain one. One draw is of a
    micro-batch and a rank. Validation, test and prediction under this callback have no draws, and pass on the mean,
    ``(1 - p) h + p f(h)``.

    The module is built at its full depth and keeps it: new blocks begin with their own first weights, and before ``start``
    cost no compute, no activation memory, no gradient and no optimizer state. While they come in, every block runs in full,
    and nothing is saved. A run that ends before ``end``, and a checkpoint of before then, are of another network than the
    plain module is, which is warned of, and which the checkpoint says.

    Logged: ``p``, and ``layers_active``, how many blocks run.

    Args:
        first: the blocks of the shallow network, >= 1.
        start: the share of the budget at which new blocks begin to come in, in [0, 1).
        end: that at which they are there, in (start, 1]; both 0 are plain training.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if the module has no more blocks than ``first`` or they lie
            within a compiled module; at the first step with a new block, if it returns a hidden state of another shape.

    Sources:
        Smith et al. 2016, "Gradual DropIn of Layers to Train Very Deep Neural Networks", CVPR.
    """

    saves: ClassVar[str] = "until the new blocks begin to come in, their compute, activation and optimizer memory"
    paper: ClassVar[str] = "Smith et al. 2016 (CVPR), arXiv:1511.06951"
    constraints: ClassVar[str] = "blocks that return a hidden state of the shape that they are given"
    survey: ClassVar[Survey | None] = Survey("DropIn", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"first": Choice((0.25, 0.5)), "start": Uniform(0.0, 0.4), "ramp": Uniform(0.2, 0.6)}, needs_blocks, _shares
    )
    control: ClassVar[Control] = Control("the shallow network throughout", _shallow)
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "Shallower"),
        "both say how many blocks the network has",
    )
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self, *, first: int = 6, start: float = 0.1, end: float = 0.5, layers: str | Sequence[str] | None = None
    ) -> None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 1:
            raise ValueError(
                f"DropIn(first={first!r}): expected a number of blocks >= 1, those of the shallow network."
            )
        if not 0.0 <= start < 1.0:
            raise ValueError(
                f"DropIn(start={start}): expected a share of the budget in [0, 1), at which new blocks begin to come in."
            )
        if not (start < end <= 1.0 or start == end == 0.0):
            raise ValueError(
                f"DropIn(start={start}, end={end}): expected end in ({start}, 1], the share of the budget at which all units"
                " of the new blocks are passed on, or both 0, which is plain training."
            )
        self.first = first
        self.start = start
        self.end = end
        self.layers = layers
        self._reset()

    @property
    @override
    def neutral(self) -> bool:
        return self.end == 0.0

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._p = 0.0
        self._batch: tuple[int, ...] = ()
        self._ran = self._told = False
        self._where = ""

    # -- set-up

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting and (self._learnt is None or self._p == 1.0):
            return
        stack = blocks_of(session, self.layers, who="DropIn", copies=False)
        if self.first > len(stack):
            raise ValueError(
                f"DropIn(first={self.first}): {stack} has {len(stack)} blocks; expected at most that many in the shallow"
                " network, because the module is built at its final depth. Lower it, or build the module deeper."
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
            rank_zero_info(f"DropIn: runs {stack.active} of {stack}, the new ones as far as {self._p:.1%}.")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is None:
            if not session.fitting:  # a plain checkpoint, or one of weights alone
                return
            raise ValueError(
                "DropIn: the checkpoint was saved without it, so it was trained at full depth (or holds weights only);"
                " expected one that says how far the new blocks are. Go on without the technique, or load the weights into"
                " the module and start a new fit."
            )
        check_length(session, self.layers, state["stack"], who="DropIn")

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
        """A new block's output as far as it is passed on; the same units however often a step runs it."""
        if index < self.first or self._p == 1.0:
            return left
        if not training:
            return drop_in(entered, left, self._p, None)
        seed = session.generator(self.name(), *self._batch, index).initial_seed()
        return drop_in(entered, left, self._p, torch.Generator(entered.device).manual_seed(seed))

    # -- state and report

    @override
    def short(self) -> str | None:
        """What is to be said of a module whose new blocks are not wholly there; None of any other."""
        stack = self._learnt if self._stack is None else self._stack.state_dict()
        if stack is None or self._p == 1.0:
            return None
        if self._p == 0.0:
            return note("DropIn", self.first, stack["length"], self._where)
        return (
            f"DropIn: of {self._where or 'the blocks'} those beyond the first {self.first} are passed on as far as"
            f" {self._p:.1%}. Loaded without DropIn in the Trainer, the module passes on all of them, and is another one than"
            " was trained and validated"
        )

    @override
    def keep(self, session: Session) -> None:
        if self._stack is not None:
            self._learnt, self._stack = self._stack.state_dict(), None

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self._learnt if self._stack is None else self._stack.state_dict()
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
        return f"{self.first} of {self._where}, the others passed on as far as {self._p:.1%} at the end"
