"""Declared arguments that adapters share."""

from collections.abc import Sequence
from typing import Annotated, Literal

from lightning_eff._core._arguments.kinds import Alias, Count, Fraction, Names

#: The rank of the factors.
Rank = Annotated[int, Count(), Alias("r")]
#: The probability to drop an input of the factors.
Dropout = Annotated[float, Fraction(below=1)]
#: The number of prompts; 0 is plain training.
Length = Annotated[int, Count(at_least=0), Alias("num_virtual_tokens")]
#: The modules to act on; None looks for them, and an empty list is plain training.
Paths = Annotated[Sequence[str] | None, Names("dotted paths or patterns")]
#: The linear layers to act on, under peft's name too.
Targets = Annotated[Paths, Alias("target_modules")]
#: What trains as a whole in addition.
Also = Annotated[Sequence[str], Names("dotted paths or patterns"), Alias("modules_to_save")]
#: What checkpoints hold.
Save = Literal["adapter", "all"]
