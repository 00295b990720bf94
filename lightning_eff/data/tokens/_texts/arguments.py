"""The kinds of arguments that name tensors of a batch, and tokens."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Kind, Number


@dataclass(frozen=True, repr=False)
class BatchKeys(Kind):
    """Names or positions of tensors in a batch, kept as a list.

    Attributes:
        number: how many there must be; None for any number.
        hint: an example, as a sentence, for the message.
    """

    number: int | None = None
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return f"a list of {'' if self.number is None else f'{self.number} '}names or positions"

    @override
    def __call__(self, value: Any) -> list[str | int]:
        keys = _listed(value)
        if not all(isinstance(key, str | int) for key in keys) or self.number not in (None, len(keys)):
            raise ValueError
        return keys


@dataclass(frozen=True, repr=False)
class TokenIds(Kind):
    """Ids of tokens, kept as a list, which may be empty.

    Attributes:
        hint: an example, as a sentence, for the message.
    """

    hint: str = field(default="Write a list, such as [101, 102].", repr=False)

    @property
    @override
    def expected(self) -> str:
        return "a list of token ids >= 0"

    @override
    def __call__(self, value: Any) -> list[int]:
        return [Count(at_least=0)(one) for one in _listed(value)]


@dataclass(frozen=True, repr=False)
class AnyInteger(Count):
    """An integer, which may be negative."""

    low = None


@dataclass(frozen=True, repr=False)
class NumberOrInfinity(Number):
    """A number between bounds, or infinity."""

    @property
    @override
    def expected(self) -> str:
        return f"a number{self._range()}, or infinity"

    @override
    def __call__(self, value: Any) -> float:
        return math.inf if isinstance(value, float) and value == math.inf else super().__call__(value)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError
    return list(value)


TokenId = Annotated[int, Count(at_least=0)]
SpecialTokens = Annotated[list[int], TokenIds()]
TextKeys = Annotated[list[str | int], BatchKeys(2, hint="Write keys=['input_ids', 'labels'] or keys=[0, 1].")]
