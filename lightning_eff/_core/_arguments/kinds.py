"""The kinds of values that an argument can have.

A kind is part of the signature, inside ``Annotated``::

    def __init__(self, keep: Annotated[float, Fraction(above=0)] = 0.5, interval: Annotated[int, Count()] = 1) -> None:

A kind describes the accepted values as text, and converts a given value to a plain Python value. For any other value it raises
``ValueError`` without a message, or :class:`Refused` with what is wrong with this value. ``declared.py`` adds the message with
the names of the class and the argument.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar

import torch
from typing_extensions import override


class Refused(ValueError):
    """A value is not accepted. Its text is a sentence about the value, for the message."""


class Kind(ABC):
    """The values that an argument accepts."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """The accepted values as a noun phrase: ``a number in (0, 1]``."""

    @abstractmethod
    def __call__(self, value: Any) -> Any:
        """Return ``value`` as a plain Python value.

        Raises:
            ValueError: if it is not accepted.
        """

    @override
    def __repr__(self) -> str:
        """Return the kind with its declared settings, as ``help()`` shows it in a signature."""
        given = [(one.name, getattr(self, one.name), one.default) for one in fields(self) if one.repr]  # pyright: ignore[reportArgumentType]
        said = [f"{name}={value!r}" for name, value, default in given if default is MISSING or value != default]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True)
class Alias:
    """Another name under which an argument is accepted, for example from another library.

    Attributes:
        name: the other name, such as ``label_smoothing``.
    """

    name: str


@dataclass(frozen=True, repr=False)
class Number(Kind):
    """A finite number between bounds. Numpy numbers and one-element tensors are accepted, but not bools.

    Attributes:
        at_least: the lower bound, inclusive.
        above: the lower bound, exclusive.
        at_most: the upper bound, inclusive.
        below: the upper bound, exclusive.
        hint: values to choose from, as a sentence, for the message.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    hint: str = field(default="", repr=False)

    #: the inclusive bounds if none are declared
    low: ClassVar[float | None] = None
    high: ClassVar[float | None] = None

    @property
    @override
    def expected(self) -> str:
        return f"a {'' if self._bounds()[1] is not None else 'finite '}number{self._range()}"

    @override
    def __call__(self, value: Any) -> float:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError
        number = _plain(value)
        if not math.isfinite(number) or not self._within(number):
            raise ValueError
        return number

    def _bounds(self) -> tuple[float | None, float | None]:
        low = self.above if self.above is not None else self.low if self.at_least is None else self.at_least
        high = self.below if self.below is not None else self.high if self.at_most is None else self.at_most
        return low, high

    def _within(self, number: float) -> bool:
        low, high = self._bounds()
        return (low is None or (number > low if low == self.above else number >= low)) and (
            high is None or (number < high if high == self.below else number <= high)
        )

    def _range(self) -> str:
        low, high = self._bounds()
        open_below, open_above = self.above is not None, self.below is not None
        if low is not None and high is not None:
            return f" in {'(' if open_below else '['}{_text(low)}, {_text(high)}{')' if open_above else ']'}"
        if low is not None:
            return f" {'>' if open_below else '>='} {_text(low)}"
        return "" if high is None else f" {'<' if open_above else '<='} {_text(high)}"


@dataclass(frozen=True, repr=False)
class Fraction(Number):
    """A number in [0, 1], unless bounds are declared."""

    low, high = 0, 1


@dataclass(frozen=True, repr=False)
class Count(Number):
    """An integer >= 1, unless a bound is declared. Numpy integers are accepted, but not bools.

    Attributes:
        even: whether it must be even.
    """

    even: bool = False

    low = 1

    @property
    @override
    def expected(self) -> str:
        return f"an {'even ' if self.even else ''}integer{self._range()}"

    @override
    def __call__(self, value: Any) -> int:
        number = super().__call__(value)
        if not isinstance(number, int) or (self.even and number % 2):
            raise ValueError
        return number


@dataclass(frozen=True, repr=False)
class Integer(Count):
    """An integer, which may be negative."""

    low = None


@dataclass(frozen=True, repr=False)
class Flag(Kind):
    """True or False. Arguments annotated with ``bool`` are checked like this without a declaration."""

    @property
    @override
    def expected(self) -> str:
        return "True or False"

    @override
    def __call__(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
            return bool(value)
        raise ValueError


class OneOf(Kind):
    """One of a few values. Arguments annotated with ``Literal`` are checked like this without a declaration.

    Args:
        choices: the values.
        hint: which one to choose, as a sentence, for the message.
    """

    def __init__(self, *choices: Any, hint: str = "") -> None:
        self.choices, self.hint = choices, hint

    @property
    @override
    def expected(self) -> str:
        *others, last = map(repr, self.choices)
        return f"{', '.join(others)} or {last}" if others else last

    @override
    def __call__(self, value: Any) -> Any:
        for choice in self.choices:
            if type(value) is type(choice) and value == choice:
                return value
        if type(value).__module__ == "numpy" and not isinstance(value, str) and getattr(value, "ndim", 1) == 0:
            return self(_plain(value))
        raise ValueError

    @override
    def __repr__(self) -> str:
        return f"OneOf({', '.join(map(repr, self.choices))})"


@dataclass(frozen=True, repr=False)
class SomeOf(Kind):
    """A list of some of a few names.

    Attributes:
        names: the names to choose from.
        once: whether each name may be given once only, and none at all is accepted.
        hint: which ones to choose, as a sentence, for the message.
    """

    names: tuple[str, ...]
    once: bool = False
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        *others, last = map(repr, self.names)
        return f"a list of some of {', '.join(others)} and {last}{', each once' if self.once else ''}"

    @override
    def __call__(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not (value or self.once):
            raise ValueError
        if any(name not in self.names for name in value) or (self.once and len(set(value)) < len(value)):
            raise ValueError
        return tuple(value)


class Either(Kind):
    """A value of any of several kinds, as in ``Either(OneOf("epoch"), Count())``.

    Args:
        kinds: the kinds, the most common one first.
        hint: which one to choose, as a sentence, for the message.
    """

    def __init__(self, *kinds: Kind, hint: str = "") -> None:
        self.kinds, self.hint = kinds, hint

    @property
    @override
    def expected(self) -> str:
        return " or ".join(kind.expected for kind in self.kinds)

    @override
    def __call__(self, value: Any) -> Any:
        why = ""
        for kind in self.kinds:
            try:
                return kind(value)
            except (ValueError, TypeError) as error:
                why = why or (str(error) if isinstance(error, Refused) else "")
        raise Refused(why)

    @override
    def __repr__(self) -> str:
        return f"Either({', '.join(map(repr, self.kinds))})"


@dataclass(frozen=True, repr=False)
class Each(Kind):
    """A sequence of values of one kind, converted to a tuple.

    Attributes:
        of: the kind of each value.
        length: the required number; None for any number.
        empty: whether an empty sequence is accepted.
        distinct: whether a value may be given only once.
        hint: values to choose from, as a sentence, for the message.
    """

    of: Kind
    length: int | None = None
    empty: bool = False
    distinct: bool = False
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        each = self.of.expected
        if isinstance(self.of, Names):
            return each
        number = "a sequence" if self.length is None else f"{self.length} values"
        return f"{number}, each {each}{' and given once' if self.distinct else ''}"

    @override
    def __call__(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError
        values = tuple(self.of(one) for one in value)
        if not (values or self.empty) or self.length not in (None, len(values)):
            raise ValueError
        if self.distinct and len(set(values)) < len(values):
            raise ValueError
        return values


@dataclass(frozen=True, repr=False)
class Names(Kind):
    """A list of names. A single string is refused, because its letters would count as names.

    Attributes:
        of: a plural noun for the names, for the message.
        empty: whether an empty list is accepted.
        hint: an example, as a sentence, for the message.
    """

    of: str = "names"
    empty: bool = True
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return f"a list of {self.of}"

    @override
    def __call__(self, value: Any) -> Sequence[str]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError
        names = value if isinstance(value, list | tuple) else list(value)
        if not all(isinstance(name, str) and name for name in names) or not (names or self.empty):
            raise ValueError
        return names


@dataclass(frozen=True, repr=False)
class Text(Kind):
    """A string.

    Attributes:
        of: its meaning, for the message: ``a dotted path of a submodule``.
        empty: whether the empty string is accepted.
        hint: an example, as a sentence, for the message.
    """

    of: str = "a string"
    empty: bool = False
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return self.of

    @override
    def __call__(self, value: Any) -> str:
        if not isinstance(value, str) or not (value or self.empty):
            raise ValueError
        return value


@dataclass(frozen=True, repr=False)
class Function(Kind):
    """A callable.

    Attributes:
        of: its arguments and its result: ``(module, batch) that returns one loss per sample``.
    """

    of: str

    @property
    @override
    def expected(self) -> str:
        return f"a function of {self.of}"

    @override
    def __call__(self, value: Any) -> Any:
        if not callable(value):
            raise ValueError
        return value


#: the blocks that a technique acts on; None, where it is accepted, finds them, and "" is the module's own sequence of blocks
Layers = Annotated[
    str | Sequence[str], Either(Text("a dotted path, a pattern", empty=True), Names("dotted paths", empty=False))
]


def _text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _plain(value: Any) -> Any:
    """Return a numpy number, or one of another library, as int or float."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)
