"""What was seen of each batch, and its sums over a run."""

from dataclasses import dataclass


@dataclass
class Record:
    """One batch, on this rank.

    Attributes:
        model: FLOPs of one forward and one backward pass.
        more: FLOPs of extra passes and of what activation checkpointing computes a second time.
        known: whether the FLOPs are.
        counted: it was counted, so that its time tells nothing.
    """

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    model: int = 0
    more: int = 0
    known: bool = True
    counted: bool = False


@dataclass
class Totals:
    """Sums over batches; ``rated_`` over those that were not counted, ``known_`` over those of known FLOPs among them."""

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    counted: int = 0
    rated_batches: int = 0
    rated_samples: int = 0
    rated_tokens: int = 0
    rated_seconds: float = 0.0
    known_batches: int = 0
    known_seconds: float = 0.0
    model: int = 0
    more: int = 0

    def add(self, record: Record, seconds: float) -> None:
        """Count a batch that took so many seconds."""
        self.batches += record.batches
        self.samples += record.samples
        self.tokens += record.tokens
        self.counted += record.batches * record.counted
        if record.counted:
            return
        self.rated_batches += record.batches
        self.rated_samples += record.samples
        self.rated_tokens += record.tokens
        self.rated_seconds += seconds
        if record.known:
            self.known_batches += record.batches
            self.known_seconds += seconds
            self.model += record.model
            self.more += record.more
