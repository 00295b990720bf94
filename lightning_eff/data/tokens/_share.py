"""How many of a sample's tokens were computed, in the last step and on average."""

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique


class Share:
    """The fraction of tokens that a technique computed.

    Attributes:
        kept: the tokens of a sample that blocks computed in the last step; 0 before the first.
        full: the tokens of a sample.
        batches: the number of micro-batches so far.
    """

    def __init__(self) -> None:
        self.kept, self.full = 0, 0
        self.batches = 0
        self._shares = 0.0

    def note(self, kept: int, full: int) -> None:
        """Record that a block computed ``kept`` of ``full`` tokens in this step."""
        self.kept, self.full = kept, full

    def note_all(self) -> None:
        """Record that this step computes all tokens, as many as the last one had."""
        self.kept = self.full

    def end_batch(self) -> None:
        """End a micro-batch."""
        self._shares += self.last
        self.batches += 1

    @property
    def last(self) -> float:
        """The fraction in the last step, in (0, 1]."""
        return self.kept / self.full if self.full else 1.0

    @property
    def mean(self) -> float:
        """The mean fraction over the micro-batches so far."""
        return self._shares / max(self.batches, 1)

    def report(self) -> dict[str, float | int]:
        return {"kept": self.kept, "share": self.last}

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "full": self.full, "shares": self._shares, "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept, self.full = state_dict["kept"], state_dict["full"]
        self._shares, self.batches = state_dict["shares"], state_dict["batches"]


class ComputesFewerTokens(Technique):
    """Base class of techniques that compute a fraction of the tokens: it logs the fraction and stores it in checkpoints."""

    _share: Share

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._share.end_batch()

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._share.report()}

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._share.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share.load_state_dict(state_dict)
