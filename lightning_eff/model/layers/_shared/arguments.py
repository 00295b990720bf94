"""Declared arguments that several techniques of this folder have."""

from collections.abc import Sequence
from typing import Annotated

from lightning_eff._core._arguments.kinds import Count, Either, Fraction, Names

#: The modules to act on; None looks for them, and an empty list is plain training.
Paths = Annotated[Sequence[str] | None, Names("dotted paths or patterns")]
#: A rank: the integer 1 is a rank of one, and 1.0 is the full rank.
COUNT_OR_FRACTION = Either(Count(), Fraction(above=0))
