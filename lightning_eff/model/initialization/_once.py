"""The base of techniques that set weights once, before the first step of a fresh fit, from a look at the first batch."""

from abc import abstractmethod
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.tracing import traced as traced
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique

_TRAINED: WeakSet[LightningModule] = WeakSet()  # begun by an initialization, and trained since


class Initialization(Technique):
    """A technique that sets weights once, before the first step of a fresh fit.

    A subclass sets them in :meth:`initialize`, which follows from the module alone, or from what all ranks know: it is called
    on each. A run that goes on from a checkpoint, and a module that was trained or loaded before, as far as that can be seen,
    are left as they are, unless ``force`` is set.

    Attributes:
        force: also set weights that were loaded or trained before.
    """

    force: bool
    _done = False
    _numbers = 0  # that were set

    @abstractmethod
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        """Set the weights, without a graph, and return how many numbers were set; None for a batch that is passed over.

        Raises:
            ValueError: if nothing is found to set.
        """

    @override
    def check(self, session: Session) -> None:
        if not self.force:
            refuse_pretrained(session.module, who=type(self).__name__, would="overwrite some of them")

    @override
    def attach(self, session: Session) -> None:
        self._done, self._numbers = False, 0
        if session.module in _TRAINED and not self.force:
            self._leave("this module was trained before")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is None and not self.force:
            self._leave("the checkpoint's run did without")

    def _leave(self, why: str) -> None:
        self._done = True
        rank_zero_info(f"{type(self).__name__}: {why}, so weights stay as they are. Give force=True to set them.")

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._done:
            return
        with torch.no_grad():
            numbers = self.initialize(session, batch, batch_idx)
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
