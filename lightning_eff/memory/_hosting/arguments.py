"""The kinds of arguments that say what goes to host memory."""

import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Number


@dataclass(frozen=True, repr=False)
class BytesOrInfinity(Number):
    """A number of bytes >= 1, or infinity."""

    low = 1

    @property
    @override
    def expected(self) -> str:
        return "a number of bytes >= 1, or infinity"

    @override
    def __call__(self, value: Any) -> float:
        return math.inf if isinstance(value, float) and value == math.inf else super().__call__(value)
