"""Shallow-to-deep training: groups of blocks, each a copy of the last, and a rate that begins anew (Li et al. 2020)."""

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._optim.rates import Rates
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth._stacking import Stacking

RATES = ("inverse_sqrt", "linear", "cosine")
BY_RATE = ("LearningRateSchedule", "ScheduleFree", "StochasticWeightAveraging")  #: which set the rates, too


def group_stages(num_blocks: int, *, group: int, until: float) -> list[tuple[float, int]]:
    """Stages of ``h, 2h, .. L`` blocks, ``h = group``, which begin at equal distances from 0 to ``until``."""
    counts = range(group, num_blocks + 1, group)
    return [(until * i / max(len(counts) - 1, 1), count) for i, count in enumerate(counts)]


def rate_within(v: float, *, shape: str, warmup: float) -> float:
    """The rate's share of its highest at ``v`` in [0, 1] of a stage, ``w = warmup``.

    ``v / w`` before ``w``; then ``sqrt(w / v)`` for "inverse_sqrt", the Transformer's; for "linear" ``1 - x`` and for "cosine"
    ``(1 + cos(pi x)) / 2``, where ``x = (v - w) / (1 - w)``.
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
    """The first group throughout."""
    if technique.until == 0.0:
        return {}
    kept = functools.partial(_of, technique.group)
    return {"the first group throughout": Shallower(kept=kept, layers=technique.layers)}


def _groups(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Groups of as near to ``first`` of all blocks as divides their number."""
    sizes = [h for h in range(1, max(profile.num_blocks, 2)) if profile.num_blocks % h == 0]
    group = min(sizes, key=lambda h: abs(h - values["first"] * profile.num_blocks), default=1)
    return cls(group=group, until=values["until"], rate=values["rate"])


class ShallowToDeep(Stacking):
    """Train the first group of ``h`` blocks, put copies of the last group on top one by one, and begin the rate anew each time.

    The module has ``L`` blocks, a multiple of ``h``. Stages of ``h, 2h, .. L`` blocks begin at equal distances, the last at
    ``until`` of the budget. At each, block ``j`` of the new group begins as a copy of block ``j - h``, the same of the last
    group. (Where a block has parameters that its source lacks, such as ModernBERT's second block, whose first has no norm,
    those keep their first values.) Each stage has a learning rate of its own, which warms up and falls as if training had
    just begun; it takes the place of the module's schedules.

    The module is built at its full depth and keeps it: blocks that do not run yet cost no compute, no activation memory, no
    gradient and no optimizer state, every checkpoint has the plain module's names, and validation, test and prediction under
    this callback run the blocks that training has reached. A run that ends before all blocks run, and a checkpoint of before
    then, hold blocks that were never trained, which is warned of, and which the checkpoint says.

    Logged: ``layers_active``, how many blocks run, ``layers_fraction``, their share of all, and ``factor``, the rate's share
    of its highest.

    Args:
        group: ``h``, the blocks of a group, >= 1.
        until: the share of the budget by which the last group is there, in [0, 1); 0.5 leaves half of it to the whole network.
        rate: "inverse_sqrt", the paper's, "linear" or "cosine": how a stage's rate falls, after its warm-up; None leaves the
            rates to the module, as one long schedule.
        warmup: the share of a stage, in (0, 1), in which its rate rises.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.
        copy_optimizer_state: give a new block the optimizer state of the one that it copies; otherwise it starts anew.

    Raises:
        ValueError: if an argument is out of its range; at setup, if the number of blocks is no multiple of ``group``, blocks
            of which one is to be a copy of the other differ in shape, or they lie within a compiled module.

    Sources:
        Li et al. 2020, "Shallow-to-Deep Training for Neural Machine Translation", arXiv:2010.03737.
    """

    saves: ClassVar[str] = "compute, activation and optimizer memory of the blocks that do not run yet"
    paper: ClassVar[str] = "Li et al. 2020, arXiv:2010.03737"
    constraints: ClassVar[str] = (
        "blocks of one class whose number is a multiple of the group's; automatic optimization; stacking lifts the loss at a"
        " switch"
    )
    survey: ClassVar[Survey | None] = Survey("shallow-to-deep training", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"first": Choice((0.25, 0.5)), "until": Uniform(0.1, 0.7), "rate": Choice((None, *RATES))},
        needs_blocks,
        _groups,
    )
    control: ClassVar[Control] = Control("the first group alone, throughout", _small_model)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("ProgressiveStacking", "CompoundGrowth", "Shallower"),
            "both say how many blocks the network has",
        ),
        **dict.fromkeys(BY_RATE, "both set the rates"),
    }
    needs_automatic_optimization: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    sets_rates: ClassVar[bool] = True

    def __init__(
        self,
        group: int = 6,
        *,
        until: float = 0.5,
        rate: str | None = "inverse_sqrt",
        warmup: float = 0.1,
        layers: str | Sequence[str] | None = None,
        copy_optimizer_state: bool = False,
    ) -> None:
        if isinstance(group, bool) or not isinstance(group, int) or group < 1:
            raise ValueError(f"ShallowToDeep(group={group!r}): expected a number of blocks >= 1. The paper's is 6.")
        if not 0.0 <= until < 1.0:
            raise ValueError(
                f"ShallowToDeep(until={until}): expected a share of the budget in [0, 1), by which all blocks run."
            )
        if rate not in (*RATES, None):
            raise ValueError(
                f"ShallowToDeep(rate={rate!r}): expected one of {', '.join(RATES)}, by which a stage's rate falls, or None,"
                " which leaves the rates to the module."
            )
        if not 0.0 < warmup < 1.0:
            raise ValueError(
                f"ShallowToDeep(warmup={warmup}): expected a share of a stage in (0, 1), in which its rate rises."
            )
        self.group = group
        self.until = until
        self.rate = rate
        self.warmup = warmup
        self.layers = layers
        self.copy_optimizer_state = copy_optimizer_state
        self.stages = [(0.0, group)]
        if rate is None:  # what leads the rates, here and in a bench, then acts on them as on any module's
            others = {name: why for name, why in self.conflicts.items() if name not in BY_RATE}
            self.conflicts = others  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
            self.sets_rates = False  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
        self._reset()

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
                f"ShallowToDeep(group={self.group}): {stack} has {len(stack)} blocks; expected a multiple of the group, because"
                f" each new group is a copy of the last. Use one of {sizes}, or build the module with another depth."
            )
        self.stages = group_stages(len(stack), group=self.group, until=self.until)
        if self.until == 0.0:
            self.stages = [(0.0, len(stack))]
            self._active = len(stack)

    @override
    def source(self, block: int, count: int) -> int:
        """The block of the last group, of those ``count`` blocks, that ``block`` copies."""
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
            self._rates.begin(self._session)  # before any hook of a batch can write others

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
