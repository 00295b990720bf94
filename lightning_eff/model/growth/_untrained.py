"""What is said of a module some of whose blocks were never trained, since it is another one without the technique."""

from abc import abstractmethod
from typing import Any, ClassVar

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_eff._core._architecture import unfinished
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique


class Growing(Technique):
    """A technique whose run may end, and whose checkpoints may be saved, before the whole module was trained.

    Both are warned of. A subclass sets ``_stack`` while it runs, ``_ran`` once a batch has been trained on, and says in
    :meth:`keep` what it has of the run once that has ended.
    """

    finishes: ClassVar[bool] = False  # whether there is an argument ``finish``
    _stack: BlockStack | None = None
    _ran = _told = False

    @abstractmethod
    def short(self) -> str | None:
        """What is to be said of the module as it is, if part of it was never trained; None of any other."""

    @abstractmethod
    def keep(self, session: Session) -> None:
        """The run has ended: keep what checkpoints, reports and evaluations will ask for, and let go of the module."""

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if not self._told and (short := self.short()):
            self._told = True
            warn_in_a_checkpoint(short, self.state_key, finish=self.finishes)

    @override
    def detach(self, session: Session) -> None:
        short = self.short()
        if session.fitting and self._ran and short:
            warn_at_the_end(short, finish=self.finishes)
        if self._stack is not None and self._ran:
            unfinished.note(self._stack.holder, short)
        self.keep(session)


def note(who: str, trained: int, length: int, where: str) -> str:
    """The state of affairs, for people.

    Args:
        who: the technique's name.
        trained: how many blocks at the front were trained.
        length: how many there are.
        where: the blocks, e.g. "12 blocks of 'model.layers'".
    """
    return (
        f"{who}: the first {trained} of the {where or f'{length} blocks'} were trained, and the others have their first"
        f" weights. Loaded without {who} in the Trainer, the module runs all {length}, and is another one than was trained"
        " and validated"
    )


def warn_at_the_end(short: str, *, finish: bool) -> None:
    """Warn that a fit left such a module; ``short`` is its :func:`note`, ``finish`` whether there is such an argument."""
    mend = " or train with finish='identity', which leaves a plain module that is right." if finish else " or train on."
    rank_zero_warn(
        f"The fit ended before all blocks ran. {short}. Evaluate it with this callback in the Trainer, go on from a"
        f" checkpoint, load the weights into a module built with as many blocks as were trained,{mend}"
    )


def warn_in_a_checkpoint(short: str, key: str, *, finish: bool) -> None:
    """Warn, the first time in a run, that a checkpoint holds such a module."""
    mend = ", or train with finish='identity', with which checkpoints are right everywhere" if finish else ""
    rank_zero_warn(
        f"A checkpoint is saved in mid-growth. {short}. Resume from it or evaluate it with this callback in the Trainer{mend}."
        f" The checkpoint says so under ['callbacks'][{key!r}]['note']. Later checkpoints are not warned of.",
        category=PossibleUserWarning,
    )
