"""The kinds of arguments of techniques that rewrite gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Kind


@dataclass(frozen=True, repr=False)
class PeriodsByName(Kind):
    """A mapping from kinds or patterns of parameters to periods, as a dict."""

    @property
    @override
    def expected(self) -> str:
        return "a dict from kinds or patterns of parameter names to integers >= 1"

    @override
    def __call__(self, value: Any) -> dict[str, int]:
        if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) and name for name in value):
            raise ValueError
        return {name: Count()(period) for name, period in value.items()}


Periods = Annotated[Mapping[str, int], PeriodsByName()]
