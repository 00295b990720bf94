"""The kinds of arguments that name tensors of a batch, and tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Kind


@dataclass(frozen=True, repr=False)
class BatchKeys(Kind):
    """A list of names or positions of tensors in a batch.

    Attributes:
        length: the required number; None for any number.
        empty: whether an empty list is accepted.
        hint: an example, as a sentence, for the message.
    """

    length: int | None = None
    empty: bool = False
    hint: str = field(default="For example ['pixel_values'] or [0].", repr=False)

    @property
    @override
    def expected(self) -> str:
        return f"a list of {f'{self.length} ' if self.length else ''}names or positions in the batch"

    @override
    def __call__(self, value: Any) -> list[str | int]:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise ValueError
        keys = list(value)
        if any(isinstance(key, bool) or not isinstance(key, str | Integral) for key in keys):
            raise ValueError
        if not (keys or self.empty) or self.length not in (None, len(keys)):
            raise ValueError
        return [key if isinstance(key, str) else int(key) for key in keys]


@dataclass(frozen=True, repr=False)
class TokenIds(Kind):
    """A list of token ids, which may be empty.

    Attributes:
        hint: an example, as a sentence, for the message.
    """

    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return "a list of token ids, each an integer >= 0"

    @override
    def __call__(self, value: Any) -> list[int]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError
        return [Count(at_least=0)(token) for token in value]
