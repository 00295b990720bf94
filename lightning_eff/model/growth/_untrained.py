"""The base of techniques whose network grows, and the warnings about blocks that were never trained."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_eff._core._architecture import unfinished
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from lightning_eff.model.growth._sizes.depth import check_length


class Growing(Technique):
    """A technique whose run may end, and whose checkpoints may be saved, before the whole module was trained.

    Both cases are warned of. A subclass sets ``_stack`` while it runs and ``_ran`` once a batch has been trained on.
    """

    finishes: ClassVar[bool] = False  # whether there is an argument ``finish``
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    layers: str | Sequence[str] | None
    _stack: BlockStack | None = None
    _learnt: dict[str, Any] | None = None  # the stack's state after the run
    _ran = _told = False

    @abstractmethod
    def short(self) -> str | None:
        """Describe the module if a part of it was never trained; None for any other."""

    def stack_state(self) -> dict[str, Any] | None:
        """Return the state of the blocks, during the run and after it; None if there is none."""
        return self._learnt if self._stack is None else self._stack.state_dict()

    def keep(self, session: Session) -> None:
        """Keep what checkpoints, reports and evaluations need after the run, and drop references to the module."""
        if self._stack is not None:
            self._learnt, self._stack = self._stack.state_dict(), None

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        who = type(self).__name__
        if state and state["stack"] is not None:
            check_length(session, self.layers, state["stack"], who=who)
        elif not state and session.fitting:  # in an evaluation it is a plain checkpoint, or one of weights alone
            raise ValueError(
                f"{who}: the checkpoint was saved without {who}, so it was trained at full size (or holds weights only)."
                f" Continue without {who}, or load the weights into the module and start a new fit."
            )

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
    """Return a description of a module whose last blocks were never trained.

    Args:
        who: the technique's name.
        trained: how many blocks at the front were trained.
        length: how many there are.
        where: the blocks, e.g. "12 blocks of 'model.layers'".
    """
    return (
        f"{who}: only the first {trained} of the {where or f'{length} blocks'} were trained; the others have their initial"
        f" weights. Without {who} in the Trainer, the module runs all {length}, and computes something else than was trained"
        " and validated"
    )


def warn_at_the_end(short: str, *, finish: bool) -> None:
    """Warn that a fit left such a module; ``short`` is its :func:`note`, and ``finish`` says whether that argument exists."""
    other = "or train with finish='identity', after which the plain module is right." if finish else "or train longer."
    rank_zero_warn(
        f"The fit ended before all blocks ran. {short}. Evaluate it with this callback in the Trainer, resume from a"
        f" checkpoint, load the weights into a module built with as many blocks as were trained, {other}"
    )


def warn_in_a_checkpoint(short: str, key: str, *, finish: bool) -> None:
    """Warn, the first time in a run, that a checkpoint holds such a module."""
    other = ", or train with finish='identity', which makes every checkpoint right" if finish else ""
    rank_zero_warn(
        f"A checkpoint is saved before all blocks run. {short}. Resume from it or evaluate it with this callback in the"
        f" Trainer{other}. The checkpoint says so under ['callbacks'][{key!r}]['note']. This warning appears once.",
        category=PossibleUserWarning,
    )
