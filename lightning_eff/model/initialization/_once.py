"""The base of techniques that set weights once, at the first batch of a fresh fit."""

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
    """The order in which techniques set weights. Those of one turn that set the same weights refuse each other."""

    MAPS = 1  #: the weights of all linear layers and convolutions
    ENDS = 2  #: the last weights of residual branches and of the network
    DATA = 3  #: weights that follow from the training data
    SEARCH = 4  #: the norms of all weights


_WHOLE: Reasons = {Part.FLAT: "the technique sets whole weights, one at a time"}
#: For techniques that compute with several whole weights at a time.
TOGETHER: Reasons = {**_WHOLE, Part.ITSELF: "the technique computes with all weights together before they are divided"}
_TRAINED: WeakSet[LightningModule] = WeakSet()  # modules that an initialization has set


class Initialization(Technique):
    """A technique that sets weights once, before the first step of a fresh fit.

    A subclass sets them in :meth:`initialize`, which every rank calls. The result may depend only on the module and on
    what all ranks know. Weights stay unchanged in a run that resumes from a checkpoint, and in a module that was loaded
    or trained before as far as this can be seen, unless ``force`` is set. Several techniques in a run act in the order
    of their :class:`Turn`.

    Under a strategy that divides weights, they are set while every process still holds the whole module, with the first
    batch of the training loader. If weights are already divided or on the meta device (``configure_model`` with
    ``fully_shard``), they are set at the first batch, one whole weight at a time, of which each process keeps its
    piece. Techniques that cannot work this way are refused at setup.

    Attributes:
        force: whether to also set weights that were loaded or trained before.
        needs_all: whether it computes with several weights together, so they cannot be set one at a time.
        turn: when it acts.
    """

    needs: ClassVar[Need] = Need.MODULE
    refuses: ClassVar[Reasons] = _WHOLE
    needs_all: ClassVar[bool] = False
    initializes: ClassVar[bool] = True
    turn: ClassVar[Turn]
    checkpointed = ("_done", "_numbers")

    force: bool
    _done = False
    _early = False  # whether weights are set before the strategy divides them
    _numbers = 0  # how many numbers were set

    @abstractmethod
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        """Set the weights, without a graph, and return how many numbers were set; None for a batch that the step skips.

        Raises:
            ValueError: if nothing is found to set.
        """

    def check_names(self, module: nn.Module) -> None:
        """Raise ``ValueError`` for arguments that name something the complete module does not have."""

    @override
    def check(self, session: Session) -> None:
        if not self.force:
            refuse_pretrained(session.module, who=type(self).__name__, would="overwrite some of them")

    @override
    def attach(self, session: Session) -> None:
        self._done, self._early, self._numbers = False, False, 0
        if session.module in _TRAINED and not self.force:
            self._leave("this module was already trained")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is not None:
            return
        if not self.force:
            self._leave(f"the checkpoint was saved without {type(self).__name__}")
        elif self._early:
            who = type(self).__name__
            raise ValueError(
                f"{who}(force=True): {type(session.trainer.strategy).__name__} loads the checkpoint's weights after it has"
                " divided them, which is too late. Load them into the module, and fit without ckpt_path."
            )

    def _leave(self, why: str) -> None:
        self._done = True
        rank_zero_info(
            f"{type(self).__name__}: left the weights unchanged, because {why}. To set them, give force=True."
        )

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
                    f"{type(technique).__name__}: {source}, and {type(technique).__name__} overwrites weights. Remove it if"
                    " they were loaded, or give force=True to confirm."
                )
        if is_plain(session.trainer.strategy):
            return
        early = is_whole(session)
        for technique in every:
            technique._early = early
            if not early:
                check_in_pieces(session, who=type(technique).__name__, can=not technique.needs_all)
            elif session.trainer.ckpt_path is None:  # otherwise the weights are loaded later
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
                f"{type(self).__name__}: training_step of {type(session.module).__name__} returned None for the first batches,"
                f" so there is no loss to look at before weights are divided. Remove {type(self).__name__}."
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
                f"{type(self).__name__}: could not set {', '.join(left[:5])}{' and others' if len(left) > 5 else ''}, because a"
                " parametrization (such as spectral_norm) computes them. Register the parametrization after the"
                " initialization, or exclude these weights."
            )
        if numbers is None:  # no weight has changed, so the next batch will do
            return
        self._done, self._numbers = True, numbers
        _TRAINED.add(session.module)
        session.blocks_changed(self)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"numbers": self._numbers}


def _in_turn(session: Session) -> "list[Initialization]":
    """Return the initializations of the run, in the order in which they act."""
    every = [t for t in session.working if isinstance(t, Initialization)]
    return sorted(every, key=lambda t: (t.turn, type(t).__name__))


def refuse_pretrained(module: nn.Module, *, who: str, would: str) -> None:
    """Raise ``ValueError`` if the weights are known to be pretrained."""
    source = _pretrained(module)
    if source:
        raise ValueError(
            f"{who}: {source}, but {who} is for random weights and would {would}. Remove {who}, or give force=True."
        )


def _pretrained(module: nn.Module) -> str:
    """Say from where ``from_pretrained`` loaded the weights; empty if it did not."""
    for path, m in module.named_modules():
        source = getattr(getattr(m, "config", None), "_name_or_path", "")
        if isinstance(source, str) and source:
            return f"{path or type(m).__name__} was loaded from {source!r}"
    return ""


def trained(module: nn.Module) -> str:
    """Say how the weights are known to be trained; empty if they are not.

    Norms begin with equal scales, and batch norms without batches. Nothing else reveals a checkpoint of one's own.
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
