"""The rates of all groups as a highest one times a factor, in the place of the module's own schedules."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.pinned_rates import HeldRates
from lightning_eff._core._optim.scheduled import optimizers_of, put_to_rest, reference_rates, schedulers_of
from lightning_eff._core.session import Session


class Rates:
    """What the groups' highest rates are, from the module's own ``configure_optimizers`` or a checkpoint.

    Learning rates that somebody writes by hand are overridden, with a warning.

    Args:
        who: sets the rates.

    Attributes:
        bases: of each optimizer, each group's highest rate, None where it has no number for one; None until training begins.
        foreign: whether the run goes on from a checkpoint whose rates another schedule had moved.
    """

    def __init__(self, who: str) -> None:
        self.held = HeldRates(who)
        self.bases: list[list[float | None]] | None = None
        self.foreign = False
        self._made: list[list[float | None]] = []

    def take_over(self, session: Session, text: str) -> None:
        """Put the module's schedulers to rest as they are made, and say so: ``text`` "in the place of the module's ..."."""
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
                rank_zero_info(f"{text} in the place of the module's {names}")
            return configured

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def made(self, session: Session) -> None:
        """The optimizers are built."""
        self._made = rates_of(session.optimizers)

    def begin(self, session: Session) -> None:
        """Training begins: what stands in the groups are the highest rates, unless a checkpoint has told them."""
        if self.bases is None:
            self.bases = self._made if self.foreign else rates_of(session.optimizers)

    def set(self, session: Session, factor: float) -> float:
        """Let each group's rate be ``factor`` times its highest; the highest of them all by then."""
        self.begin(session)
        assert self.bases is not None
        for optimizer, bases in zip(session.optimizers, self.bases, strict=True):
            self.held.set(optimizer, bases, factor)
        return max((rate for found in rates_of(session.optimizers) for rate in found if rate is not None), default=0.0)

    def load(self, bases: list[list[float | None]] | None) -> None:
        """Take over ``bases`` of a checkpoint."""
        self.bases = None if bases is None else [list(found) for found in bases]


def rates_of(optimizers: list[Optimizer]) -> list[list[float | None]]:
    """The rate of every group of every optimizer; None where a group has no number for one."""
    return [[None if g.get("lr") is None else float(g["lr"]) for g in o.param_groups] for o in optimizers]
