"""The record of a batch, and sums over a run."""

from dataclasses import dataclass, field, fields


@dataclass
class Sums:
    """Sums over some batches on this rank.

    Attributes:
        model: FLOPs of one forward and one backward pass per batch.
        more: FLOPs of extra passes and of recomputation.
    """

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    model: int = 0
    more: int = 0
    seconds: float = 0.0

    def plus(self, other: "Sums", sign: int = 1) -> "Sums":
        """Return the sum with ``other``, or the difference if ``sign`` is -1."""
        return Sums(*(getattr(self, name) + sign * getattr(other, name) for name in _NAMES))


_NAMES = tuple(f.name for f in fields(Sums))


@dataclass
class Record(Sums):
    """One batch.

    Attributes:
        known: whether its FLOPs are known.
        counted: whether its FLOPs were counted in it, which makes its time meaningless.
    """

    known: bool = True
    counted: bool = False


@dataclass
class Totals:
    """Sums over all batches, over those with a meaningful time (``rated``), and over those of known FLOPs among them."""

    every: Sums = field(default_factory=Sums)
    rated: Sums = field(default_factory=Sums)
    known: Sums = field(default_factory=Sums)

    def add(self, record: Record, seconds: float) -> None:
        """Add a batch that took ``seconds``."""
        record.seconds = seconds
        self.every = self.every.plus(record)
        if not record.counted:
            self.rated = self.rated.plus(record)
            self.known = self.known.plus(record) if record.known else self.known
