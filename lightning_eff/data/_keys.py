"""A kind of argument: names or positions of tensors in a batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Kind


@dataclass(frozen=True, repr=False)
class Keys(Kind):
    """A list of names (dict, dataclass) or positions (tuple, list) in a batch.

    Attributes:
        example: such a list, for the message.
        empty: whether an empty list is accepted.
    """

    example: str
    empty: bool = field(default=False, repr=False)

    @property
    @override
    def expected(self) -> str:
        return f"a list of names or positions, such as {self.example}"

    @override
    def __call__(self, value: Any) -> list[str | int]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError
        keys = list(value)
        if not (keys or self.empty) or any(isinstance(key, bool) or not isinstance(key, str | int) for key in keys):
            raise ValueError
        return keys
