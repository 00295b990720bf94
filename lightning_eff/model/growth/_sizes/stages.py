"""The stages of a network that grows: pairs (fraction of the budget, size)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Kind, Number
from lightning_eff._core.search_space import RunProfile

Size = TypeVar("Size", int, float)
_FRACTION = Fraction(above=0)


@dataclass(frozen=True, repr=False)
class Stages(Kind):
    """Pairs (fraction of the budget, size) that both grow, the first at fraction 0; kept as a list of tuples.

    Attributes:
        of: what the size is, for the message: ``number of blocks``.
        size: the kind of each size.
        hint: an example, as a sentence, for the message.
    """

    of: str
    size: Number = _FRACTION
    hint: str = field(default="Example: [(0.0, 0.5), (0.3, 1.0)].", repr=False)

    @property
    @override
    def expected(self) -> str:
        limits = ">= 1" if isinstance(self.size, Count) else "in (0, 1]"
        return (
            f"pairs (fraction of the budget in [0, 1), {self.of} {limits}), both growing, with 0 as the first fraction"
        )

    @override
    def __call__(self, value: Any) -> list[tuple[float, float]]:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise ValueError
        pairs = [self._pair(pair) for pair in value]
        if pairs[0][0] != 0.0:
            raise ValueError
        if any(after <= before or more <= less for (before, less), (after, more) in pairwise(pairs)):
            raise ValueError
        return pairs

    def _pair(self, value: Any) -> tuple[float, float]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ValueError
        fraction, size = value
        if isinstance(self.size, Count):
            return float(Fraction(below=1)(fraction)), self.size(_integer(size))
        return float(Fraction(below=1)(fraction)), float(self.size(size))


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def size_at(stages: Sequence[tuple[float, Size]], u: float) -> Size:
    """Return the size at ``u`` in [0, 1]: that of the last pair whose fraction is not above it."""
    return next(size for fraction, size in reversed(stages) if u >= fraction - 1e-9)


def doubling(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Make a technique whose stages double from ``first``, a fraction of all blocks, and end at ``until`` of the budget."""
    counts = [max(round(values["first"] * profile.num_blocks), 1)]
    while counts[-1] < profile.num_blocks:
        counts.append(min(2 * counts[-1], profile.num_blocks))
    stages = [(values["until"] * i / max(len(counts) - 1, 1), count) for i, count in enumerate(counts)]
    return cls(stages=stages, init=values["init"], copy_optimizer_state=values["copy_optimizer_state"])
