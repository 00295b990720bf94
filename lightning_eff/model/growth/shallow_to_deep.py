"""Shallow-to-deep training: add copies of the last group of blocks, and restart the learning rate (Li et al. 2020)."""

import functools
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Layers
from lightning_eff._core._optim.learning_rates import Rates
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth._stacking import Stacking

BY_RATE = ("LearningRateSchedule", "ScheduleFree", "StochasticWeightAveraging")  #: these set the learning rate, too


def group_stages(num_blocks: int, *, group: int, until: float) -> list[tuple[float, int]]:
    """Return stages of ``h, 2h, .. L`` blocks, with ``h = group``, that begin at equal distances from 0 to ``until``."""
    counts = range(group, num_blocks + 1, group)
    return [(until * i / max(len(counts) - 1, 1), count) for i, count in enumerate(counts)]


def rate_within(v: float, *, shape: str, warmup: float) -> float:
    """Return the learning rate at ``v`` in [0, 1] of a stage, relative to its highest value; ``w = warmup``.

    It is ``v / w`` before ``w``. Then it is ``sqrt(w / v)`` for "inverse_sqrt" (the Transformer's), ``1 - x`` for
    "linear" and ``(1 + cos(pi x)) / 2`` for "cosine", where ``x = (v - w) / (1 - w)``.
    """
    if v < warmup:
        return v / warmup
    x = (v - warmup) / (1.0 - warmup)
    if shape == "inverse_sqrt":
        return math.sqrt(warmup / v)
    return 1.0 - x if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))


def _of(count: int, num_blocks: int) -> int:
    return min(count, num_blocks)


def _small_model(technique: "ShallowToDeep") -> dict[str, Callback]:
    """Make the control run: the first group throughout."""
    if technique.until == 0.0:
        return {}
    kept = functools.partial(_of, technique.group)
    return {"the first group throughout": Shallower(kept=kept, layers=technique.layers)}


def _groups(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Make the technique with groups as close to ``first`` of all blocks as divides their number."""
    sizes = [h for h in range(1, max(profile.num_blocks, 2)) if profile.num_blocks % h == 0]
    group = min(sizes, key=lambda h: abs(h - values["first"] * profile.num_blocks), default=1)
    return cls(group=group, until=values["until"], rate=values["rate"])


class ShallowToDeep(Stacking):
    """Train the first group of blocks, then add a copy of the last group in each stage and restart the learning rate.

    The module has ``L`` blocks, a multiple of the group size ``h``. Stages of ``h, 2h, .. L`` blocks begin at equal
    distances, the last one at ``until`` of the budget. Block ``j`` of a new group starts as a copy of block ``j - h``.
    Each stage has its own learning-rate schedule, which warms up and falls as if training had just begun. It replaces
    the module's schedules.

    Use it for deep transformers. Compared with :class:`ProgressiveStacking` it adds fixed groups
    and restarts the learning rate. The loss rises at each switch.

    The module is built at its full depth and keeps it. Blocks that do not run yet cost no compute, no activation
    memory, no gradient and no optimizer state. Every checkpoint has the plain module's names. Validation, test and
    prediction under this callback run the blocks that training has reached. If a run ends before all blocks run, or a
    checkpoint is saved before, the other blocks were never trained; a warning and a note in the checkpoint say so.
    Parameters that a block has and its source lacks (ModernBERT's first block has no norm) keep their initial values.

    Logged: ``layers_active``, the number of blocks that run; ``layers_fraction``, their fraction of all; ``factor``,
    the learning rate relative to its highest value.

    Args:
        group: the number of blocks ``h`` in a group. 6 is the paper's.
        until: the fraction of the budget at which the last group is added. 0.5 trains the whole network for half of the
            budget.
        rate: the shape of a stage's learning rate after its warm-up. "inverse_sqrt" is the paper's. None leaves the
            learning rate to the module, as one long schedule.
        warmup: the fraction of a stage in which its learning rate rises.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.
        copy_optimizer_state: whether a new block copies the optimizer state of its source. Otherwise it starts empty.

    Raises:
        ValueError: for a value out of range. At setup, if the number of blocks is not a multiple of ``group``, a block
            differs in shape from the one it copies, or the blocks lie within a compiled module.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ShallowToDeep(group=6, until=0.5)])

    References:
        Li et al. 2020, "Shallow-to-Deep Training for Neural Machine Translation", arXiv:2010.03737.
    """

    paper = "Li et al. 2020, arXiv:2010.03737"
    constraints = (
        "blocks of one class whose number is a multiple of the group size; automatic optimization; the loss "
        "rises at a switch"
    )
    search_space = SearchSpace(
        {
            "first": Choice((0.25, 0.5)),
            "until": Uniform(0.1, 0.7),
            "rate": Choice((None, "inverse_sqrt", "linear", "cosine")),
        },
        needs_blocks,
        _groups,
    )
    control = Control("only the first group, throughout", _small_model)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("ProgressiveStacking", "CompoundGrowth", "Shallower"),
            "both set how many blocks run",
        ),
        **dict.fromkeys(BY_RATE, "both set the learning rate"),
    }
    needs_automatic_optimization: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    sets_rates: ClassVar[bool] = True

    def __init__(
        self,
        group: Annotated[int, Count()] = 6,
        *,
        until: Annotated[float, Fraction(below=1)] = 0.5,
        rate: Literal["inverse_sqrt", "linear", "cosine"] | None = "inverse_sqrt",
        warmup: Annotated[float, Fraction(above=0, below=1)] = 0.1,
        layers: Layers | None = None,
        copy_optimizer_state: bool = False,
    ) -> None:
        self.group = group
        self.until = until
        self.rate = rate
        self.warmup = warmup
        self.layers = layers
        self.copy_optimizer_state = copy_optimizer_state
        self.stages = [(0.0, group)]
        if rate is None:  # then other techniques may set the learning rate, and it acts on this one as on any module
            others = {name: why for name, why in self.conflicts.items() if name not in BY_RATE}
            self.conflicts = others  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
            self.sets_rates = False  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone

    def _reset(self) -> None:
        super()._reset()
        self._rates = Rates("ShallowToDeep")
        self._factor = 1.0

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0 and self.rate is None

    @property
    @override
    def rests(self) -> bool:
        return self.rate is None

    # -- blocks

    @override
    def check_stack(self, stack: BlockStack) -> None:
        if self.group > len(stack) or len(stack) % self.group:
            sizes = ", ".join(str(h) for h in range(1, len(stack) + 1) if len(stack) % h == 0)
            raise ValueError(
                f"ShallowToDeep(group={self.group}): {stack} has {len(stack)} blocks, which is not a multiple of the group"
                f" size. Use one of {sizes}, or build the module with another depth."
            )
        self.stages = group_stages(len(stack), group=self.group, until=self.until)
        if self.until == 0.0:
            self.stages = [(0.0, len(stack))]
            self._active = len(stack)

    @override
    def source(self, block: int, count: int) -> int:
        """Return the block of the last group that ``block`` copies."""
        return block - self.group

    # -- rates

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        if self.rate is not None:
            self._rates.take_over(session, f"ShallowToDeep: {self.rate} in each stage")

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        self._rates.made(session)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._session is not None and not self.neutral and self.rate is not None:
            self._rates.begin(self._session)  # before a batch hook can write other learning rates

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._rates.held.release()

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        if self.rate is None:
            return
        starts = [*(u for u, _ in self.stages), 1.0]
        u = session.progress.u
        a, b = next(((a, b) for a, b in reversed([*pairwise(starts)]) if u >= a - 1e-9), (0.0, 1.0))
        self._factor = rate_within(min(max((u - a) / (b - a), 0.0), 1.0), shape=self.rate, warmup=self.warmup)
        self._rates.set(session, self._factor)

    # -- state and report

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "bases": self._rates.bases} if state else state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._rates.load(state_dict["bases"])

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        found = super().report()
        return {**found, "factor": self._factor} if found else found
