"""Declared arguments that the techniques of this folder share."""

from collections.abc import Sequence
from typing import Annotated, Literal

from lightning_eff._core._arguments.kinds import Count, Each, Fraction, Names

#: The fraction of the masked weights that is zero; 0 is plain training.
Sparsity = Annotated[float, Fraction(below=1)]
#: The weights to mask; None means all, and an empty list is plain training.
Weights = Annotated[Sequence[str] | None, Names("dotted paths or patterns")]
#: The weights among these that are left alone.
Dense = Annotated[Sequence[str], Names("dotted paths or patterns")]
#: Rows and columns of the blocks that are masked together.
Sides = Annotated[Sequence[int], Each(Count(), length=2)]
#: How the zeros are distributed over the weights.
Distribution = Literal["uniform", "erk"]
#: Whether the smallest weights are chosen in the whole network or in each weight.
Scope = Literal["global", "layer"]
