"""The kinds of arguments that name tensors of a batch, and tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import BatchKeys, Count, Kind


@dataclass(frozen=True, repr=False)
class TwoKeys(BatchKeys):
    """Two names or positions of tensors in a batch: of the tokens and of their labels."""

    hint: str = field(default="Write keys=['input_ids', 'labels'] or keys=[0, 1].", repr=False)

    @property
    @override
    def expected(self) -> str:
        return "a list of 2 names or positions in the batch"

    @override
    def __call__(self, value: Any) -> list[str | int]:
        keys = super().__call__(value)
        if len(keys) != 2:
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
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError
        return [Count(at_least=0)(one) for one in value]


@dataclass(frozen=True, repr=False)
class AnyInteger(Count):
    """An integer, which may be negative."""

    low = None


TokenId = Annotated[int, Count(at_least=0)]
SpecialTokens = Annotated[list[int], TokenIds()]
TextKeys = Annotated[list[str | int], TwoKeys()]
