"""How many tokens of a sample were computed, of how many: in the last step, and on average."""

from typing import Any


class Share:
    """What a technique that leaves out tokens tells of them, and keeps in checkpoints.

    Attributes:
        kept: tokens of a sample that blocks ran on in the last step; 0 before the first.
        full: of how many.
        batches: micro-batches so far.
    """

    def __init__(self) -> None:
        self.kept, self.full = 0, 0
        self.batches = 0
        self._shares = 0.0

    def note(self, kept: int, full: int) -> None:
        """Of a block in this step."""
        self.kept, self.full = kept, full

    def note_all(self) -> None:
        """This step runs on all tokens, of as many as there were in the last."""
        self.kept = self.full

    def end_batch(self) -> None:
        """A micro-batch is over."""
        self._shares += self.last
        self.batches += 1

    @property
    def last(self) -> float:
        """The share of the last step, in (0, 1]."""
        return self.kept / self.full if self.full else 1.0

    @property
    def mean(self) -> float:
        """The share on average over the micro-batches so far."""
        return self._shares / max(self.batches, 1)

    def report(self) -> dict[str, float | int]:
        return {"kept": self.kept, "share": self.last}

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "full": self.full, "shares": self._shares, "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept, self.full = state_dict["kept"], state_dict["full"]
        self._shares, self.batches = state_dict["shares"], state_dict["batches"]
