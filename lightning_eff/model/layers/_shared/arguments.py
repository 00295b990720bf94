"""Declared arguments that several techniques of this folder have."""

from collections.abc import Sequence
from typing import Annotated, Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Fraction, Kind, Names

#: The modules to act on; None looks for them, and an empty list is plain training.
Paths = Annotated[Sequence[str] | None, Names("dotted paths or patterns")]
#: A rank: the integer 1 is a rank of one, and 1.0 is the full rank.
COUNT_OR_FRACTION = Either(Count(), Fraction(above=0))


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
