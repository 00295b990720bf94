"""The base of techniques that set weights once, before the first step of a fresh fit, from a look at the first batch."""

from abc import abstractmethod
from enum import IntEnum
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.computed import as_parameters
from lightning_eff._core._branches.tracing import traced as traced
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from lightning_eff.model.initialization._divided.early import (
    as_one_process,
    check_in_pieces,
    first_batches,
    is_whole,
)


class Turn(IntEnum):
    """In which order techniques set weights; those of one turn that set the same ones refuse each other."""

    MAPS = 1  #: all maps
    ENDS = 2  #: those in which residual branches and the network end, after all
    DATA = 3  #: those that the training data tells, beside what the others have
    SEARCH = 4  #: norms of all


_WHOLE: Reasons = {Part.FLAT: "the technique sets whole weights, one at a time"}
#: Of those that compute what they set from several whole weights.
TOGETHER: Reasons = {**_WHOLE, Part.ITSELF: "the technique computes with all weights together before they are divided"}
_TRAINED: WeakSet[LightningModule] = WeakSet()  # begun by an initialization, and trained since


class Initialization(Technique):
    """A technique that sets weights once, before the first step of a fresh fit.

    A subclass sets them in :meth:`initialize`, which follows from the module alone, or from what all ranks know: it is called
    on each. A run that goes on from a checkpoint, and a module that was trained or loaded before, as far as that can be seen,
    are left as they are, unless ``force`` is set.

    Of several in one run, each acts in its :class:`Turn`, in whatever order they are given.

    Under a strategy that divides weights they are set while every process still holds the whole module, before the strategy
    sets up, with the first batch of the training loader taken beside the run. Where weights are divided or nowhere by then,
    as a ``configure_model`` that calls ``fully_shard`` and the meta device leave them, they are set at the first batch,
    one whole weight at a time, of which each process keeps its piece; what cannot be so is refused at setup.

    Attributes:
        force: also set weights that were loaded or trained before.
        needs_all: what is computed takes several weights together, so that they cannot be set one at a time.
        turn: when it acts, among others.
    """

    needs: ClassVar[Need] = Need.MODULE
    refuses: ClassVar[Reasons] = _WHOLE
    needs_all: ClassVar[bool] = False
    turn: ClassVar[Turn]

    force: bool
    _done = False
    _early = False  # set before the strategy divides weights
    _numbers = 0  # that were set

    @abstractmethod
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        """Set the weights, without a graph, and return how many numbers were set; None for a batch that is passed over.

        Raises:
            ValueError: if nothing is found to set.
        """

    def check_names(self, module: nn.Module) -> None:
        """Raise ``ValueError`` for arguments that name what the module, which is complete, has not."""

    @override
    def check(self, session: Session) -> None:
        if not self.force:
            refuse_pretrained(session.module, who=type(self).__name__, would="overwrite some of them")

    @override
    def attach(self, session: Session) -> None:
        self._done, self._early, self._numbers = False, False, 0
        if session.module in _TRAINED and not self.force:
            self._leave("this module was trained before")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is not None:
            return
        if not self.force:
            self._leave("the checkpoint's run did without")
        elif self._early:
            who = type(self).__name__
            raise ValueError(
                f"{who}(force=True): {type(session.trainer.strategy).__name__} loads the checkpoint's weights when it has"
                " divided them; expected weights that can be set before. Load them into the module, and fit without ckpt_path."
            )

    def _leave(self, why: str) -> None:
        self._done = True
        rank_zero_info(f"{type(self).__name__}: {why}, so weights stay as they are. Give force=True to set them.")

    @override
    def on_model(self, session: Session) -> None:
        every = _in_turn(session)
        if not session.fitting or every[0] is not self:
            return
        for technique in every:
            technique.check_names(session.module)
            fresh = session.trainer.ckpt_path is None and not (technique._done or technique.force)
            if fresh and (source := trained(session.module)):
                rank_zero_info(
                    f"{type(technique).__name__}: {source}; it overwrites weights, and is meant for random ones. Take it out"
                    " where they were loaded, or give force=True, which says that you know."
                )
        if is_plain(session.trainer.strategy):
            return
        early = is_whole(session)
        for technique in every:
            technique._early = early
            if not early:
                check_in_pieces(session, who=type(technique).__name__, can=not technique.needs_all)
            elif session.trainer.ckpt_path is None:  # whose weights come in later
                technique._begin(session)

    def _begin(self, session: Session) -> None:
        """Set the weights before the run begins."""
        if self._done:
            return
        with as_one_process(session):
            for batch in first_batches(session):
                self._set(session, batch, 0)
                if self._done:
                    return
        if session.trainer.num_training_batches:
            raise ValueError(
                f"{type(self).__name__}: training_step of {type(session.module).__name__} returned None for the first batches;"
                " expected a loss, with a graph that is looked through before weights are divided. Take the technique out."
            )

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        every = _in_turn(session)
        if every[0] is self:
            for technique in every:
                if not technique._done and not technique._early:
                    technique._set(session, batch, batch_idx)

    def _set(self, session: Session, batch: Any, batch_idx: int) -> None:
        with torch.no_grad(), as_parameters(session.module) as left:
            numbers = self.initialize(session, batch, batch_idx)
        if left:
            rank_zero_warn(
                f"{type(self).__name__}: {', '.join(left[:5])}{' and others' if len(left) > 5 else ''} stay as they were,"
                " because a parametrization (such as spectral_norm) computes them and cannot give what was set. Register the"
                " parametrization after the initialization, or leave these weights out."
            )
        if numbers is None:  # no weight moves, so the next batch is as good
            return
        self._done, self._numbers = True, numbers
        _TRAINED.add(session.module)
        session.blocks_changed(self)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"numbers": self._numbers}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "numbers": self._numbers}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done, self._numbers = state_dict["done"], state_dict["numbers"]


def _in_turn(session: Session) -> "list[Initialization]":
    """Those of the run that set weights once, in the order in which they do."""
    every = [t for t in session.working if isinstance(t, Initialization)]
    return sorted(every, key=lambda t: (t.turn, type(t).__name__))


def refuse_pretrained(module: nn.Module, *, who: str, would: str) -> None:
    """Raise ``ValueError`` where something tells that weights were loaded."""
    source = _pretrained(module)
    if source:
        raise ValueError(
            f"{who}: {source}; expected random weights, since it would {would}. Take the technique out, or give force=True."
        )


def _pretrained(module: nn.Module) -> str:
    """What tells that weights were loaded, in words: what ``from_pretrained`` notes; empty where nothing does."""
    for path, m in module.named_modules():
        source = getattr(getattr(m, "config", None), "_name_or_path", "")
        if isinstance(source, str) and source:
            return f"{path or type(m).__name__} was loaded from {source!r}"
    return ""


def trained(module: nn.Module) -> str:
    """What tells that weights were trained, in words; empty where nothing does.

    Norms begin with scales that are all the same, and batch norms without a batch: of a module that was loaded from a
    checkpoint of one's own nothing else tells.
    """
    for path, m in module.named_modules():
        seen = getattr(m, "num_batches_tracked", None)
        if isinstance(seen, Tensor) and not seen.is_meta and int(seen):
            return f"{path}, of {type(m).__name__}, has seen {int(seen)} batches"
        weight = getattr(m, "weight", None)
        if "norm" not in type(m).__name__.lower() or not isinstance(weight, Tensor) or weight.ndim != 1:
            continue
        if not weight.is_meta and not hasattr(weight, "to_local") and bool((weight != weight[:1]).any()):
            return f"{path}, of {type(m).__name__}, has scales that differ, as after training"
    return ""
