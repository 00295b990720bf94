"""Learning rates of all groups as a peak value times a factor, in place of the module's own schedules."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.pinned_rates import HeldRates
from lightning_eff._core._optim.scheduled import optimizers_of, put_to_rest, reference_rates, schedulers_of
from lightning_eff._core.session import Session


class Rates:
    """The groups' peak learning rates, from the module's ``configure_optimizers`` or a checkpoint.

    Learning rates that other code writes are overridden, with a warning.

    Args:
        who: the technique that sets the learning rates.

    Attributes:
        held: sets the learning rates.
        bases: for each optimizer, each group's peak learning rate; None for a group without one, or before training begins.
        foreign: whether the run resumes from a checkpoint whose learning rates another schedule had changed.
    """

    def __init__(self, who: str) -> None:
        self.held = HeldRates(who)
        self.bases: list[list[float | None]] | None = None
        self.foreign = False
        self._made: list[list[float | None]] = []

    def take_over(self, session: Session, text: str) -> None:
        """Disable the module's schedulers when they are created, and log ``text`` "instead of the module's ..."."""
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            schedulers = schedulers_of(configured)
            for optimizer in optimizers_of(configured):
                for group, rate in zip(optimizer.param_groups, reference_rates(optimizer, schedulers), strict=True):
                    if rate is not None and group.get("lr") is not None:
                        set_rate(group, rate)
            if schedulers:
                put_to_rest(schedulers)
                names = ", ".join(type(scheduler).__name__ for scheduler in schedulers)
                rank_zero_info(f"{text} instead of the module's {names}")
            return configured

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def made(self, session: Session) -> None:
        """Record the learning rates when the optimizers are built."""
        self._made = rates_of(session.optimizers)

    def begin(self, session: Session) -> None:
        """Take the groups' present values as peak learning rates, unless a checkpoint has set them."""
        if self.bases is None:
            self.bases = self._made if self.foreign else rates_of(session.optimizers)

    def set(self, session: Session, factor: float) -> float:
        """Set each group's learning rate to ``factor`` times its peak; return the largest."""
        self.begin(session)
        assert self.bases is not None
        for optimizer, bases in zip(session.optimizers, self.bases, strict=True):
            self.held.set(optimizer, bases, factor)
        return max((rate for found in rates_of(session.optimizers) for rate in found if rate is not None), default=0.0)

    def load(self, bases: list[list[float | None]] | None) -> None:
        """Take ``bases`` from a checkpoint."""
        self.bases = None if bases is None else [list(found) for found in bases]


def rates_of(optimizers: list[Optimizer]) -> list[list[float | None]]:
    """Return the learning rate of every group of every optimizer; None for a group without one."""
    return [[None if g.get("lr") is None else float(g["lr"]) for g in o.param_groups] for o in optimizers]
