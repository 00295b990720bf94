"""The kind of arguments that list the stages of a run: pairs (fraction of the budget, size)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Kind, Number, Refused

_FRACTION = Fraction(above=0)


@dataclass(frozen=True, repr=False)
class Stages(Kind):
    """Pairs (fraction of the budget, size), the first at fraction 0, with growing fractions; kept as a list of tuples.

    Attributes:
        of: what the size is, for the message: ``number of blocks``.
        size: the kind of each size.
        hint: an example, as a sentence, for the message.
        grows: whether the sizes must grow too.
    """

    of: str
    size: Number = _FRACTION
    hint: str = field(default="Example: [(0.0, 0.5), (0.3, 1.0)].", repr=False)
    grows: bool = True

    @property
    @override
    def expected(self) -> str:
        limits = ">= 1" if isinstance(self.size, Count) else "in (0, 1]"
        grow = "both growing, with 0 as the first fraction" if self.grows else "with growing fractions from 0"
        return f"pairs (fraction of the budget in [0, 1), {self.of} {limits}), {grow}"

    @override
    def __call__(self, value: Any) -> list[tuple[float, float]]:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise ValueError
        pairs = [self._pair(pair) for pair in value]
        if pairs[0][0] != 0.0:
            raise Refused(f"The first fraction is {pairs[0][0]:g}.")
        for before, after in pairwise(pairs):
            if after[0] <= before[0] or (self.grows and after[1] <= before[1]):
                raise Refused(f"{after} does not follow {before}.")
        return pairs

    def _pair(self, value: Any) -> tuple[float, float]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ValueError
        fraction, size = value
        if isinstance(self.size, Count) and isinstance(size, float) and size.is_integer():
            size = int(size)
        share, size = Fraction(below=1)(fraction), self.size(size)
        return float(share), size if isinstance(self.size, Count) else float(size)
