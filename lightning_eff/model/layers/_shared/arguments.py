"""Declared arguments that several techniques of this folder have."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Each, Fraction, Kind, Names, Number, Text

#: Which modules to act on; None looks for them, and an empty list is plain training.
Paths = Annotated[Sequence[str] | None, Names("dotted paths or patterns")]


@dataclass(frozen=True, repr=False)
class CountOrFraction(Kind):
    """An integer >= 1, or a float in (0, 1]: the integer 1 is a count, and 1.0 is the whole.

    Attributes:
        hint: values to choose from, as a sentence, for the message.
    """

    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return "an integer >= 1 or a fraction in (0, 1]"

    @override
    def __call__(self, value: Any) -> int | float:
        number = Number()(value)
        return Count()(number) if isinstance(number, int) else Fraction(above=0)(number)


@dataclass(frozen=True, repr=False)
class CountOrCounts(Kind):
    """An integer >= 1, or several different ones as a tuple."""

    @property
    @override
    def expected(self) -> str:
        return "an integer >= 1, or several different ones"

    @override
    def __call__(self, value: Any) -> int | tuple[int, ...]:
        if isinstance(value, numbers.Number):
            return Count()(value)
        several = Each(Count())(value)
        if len(set(several)) < len(several):
            raise ValueError
        return several


@dataclass(frozen=True, repr=False)
class OrInfinite(Number):
    """A number between bounds, or infinity."""

    @override
    def __call__(self, value: Any) -> float:
        return math.inf if isinstance(value, float) and value == math.inf else super().__call__(value)


@dataclass(frozen=True, repr=False)
class PathOrPaths(Kind):
    """A dotted path or pattern, or several of them."""

    @property
    @override
    def expected(self) -> str:
        return "a dotted path or pattern, or a list of them"

    @override
    def __call__(self, value: Any) -> str | Sequence[str]:
        return Text()(value) if isinstance(value, str) else Names(empty=False)(value)


class Subset(Kind):
    """A list of some of a few values, each at most once; an empty list is accepted.

    Args:
        choices: the values.
        hint: which ones to choose, as a sentence, for the message.
    """

    def __init__(self, *choices: str, hint: str = "") -> None:
        self.choices, self.hint = choices, hint

    @property
    @override
    def expected(self) -> str:
        return f"a list of {' and '.join(map(repr, self.choices))}"

    @override
    def __call__(self, value: Any) -> Sequence[str]:
        chosen = Names()(value)
        if not set(chosen) <= set(self.choices) or len(set(chosen)) < len(chosen):
            raise ValueError
        return chosen

    @override
    def __repr__(self) -> str:
        return f"Subset({', '.join(map(repr, self.choices))})"
