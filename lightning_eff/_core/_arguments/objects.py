"""The kinds of arguments that are objects, paths, mappings, or one number per sample of the data set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Kind, Refused
from lightning_eff._core._lightning.names import is_a


@dataclass(frozen=True, repr=False)
class Instance(Kind):
    """An object of one of some classes. Lightning's classes may be of either package.

    Attributes:
        of: the accepted objects, for the message: ``a LightningModule``.
        classes: the classes.
        hint: an example, as a sentence, for the message.
    """

    of: str
    classes: tuple[type, ...] = field(repr=False)
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return self.of

    @override
    def __call__(self, value: Any) -> Any:
        if not is_a(value, *self.classes):
            raise ValueError
        return value


@dataclass(frozen=True, repr=False)
class FilePath(Kind):
    """The path of a file or folder, a string or ``os.PathLike``. It need not exist.

    Attributes:
        of: its meaning, for the message: ``the path of a config``.
        suffixes: the accepted endings; empty for any.
    """

    of: str = "a path"
    suffixes: tuple[str, ...] = ()

    @property
    @override
    def expected(self) -> str:
        return f"{self.of}{' that ends in ' if self.suffixes else ''}{' or '.join(self.suffixes)}"

    @override
    def __call__(self, value: Any) -> Any:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ValueError
        if self.suffixes and Path(value).suffix not in self.suffixes:
            raise ValueError
        return value


@dataclass(frozen=True, repr=False)
class Table(Kind):
    """A mapping from names to values of one kind, converted to a dict.

    Attributes:
        names: a plural noun for the names, for the message.
        of: the kind of each value.
        hint: an example, as a sentence, for the message.
    """

    names: str
    of: Kind
    hint: str = field(default="", repr=False)

    @property
    @override
    def expected(self) -> str:
        return f"a mapping from {self.names} to values, each {self.of.expected}"

    @override
    def __call__(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError
        found = {}
        for name, one in value.items():
            try:
                found[name] = self.of(one)
            except (ValueError, TypeError):
                raise Refused(f"The value of {name!r} is {one!r}.") from None
        return found


@dataclass(frozen=True, repr=False)
class PerSample(Kind):
    """One number per sample of the data set, as a list or tensor, converted to a tensor on the CPU.

    Attributes:
        dtype: the type of the result. An integer type accepts only integers.
        infinite: whether infinite numbers are accepted.
        at_least: the lower bound; None for none.
    """

    dtype: torch.dtype = torch.float64
    infinite: bool = False
    at_least: float | None = None

    @property
    @override
    def expected(self) -> str:
        number = f"{'' if self.infinite else 'finite '}number" if self.dtype.is_floating_point else "integer"
        limit = "" if self.at_least is None else f" >= {self.at_least}"
        return f"one {number}{limit} for each sample of the data set, as a list or a tensor of shape (N,)"

    @override
    def __call__(self, value: Any) -> Tensor:
        if isinstance(value, str | bytes):
            raise ValueError
        try:
            found = torch.as_tensor(value).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refused(f"It cannot be a tensor: {str(error).rstrip('.')}.") from None
        whole = not found.is_floating_point() or self.dtype.is_floating_point
        if found.ndim != 1 or not len(found) or found.is_complex() or found.dtype == torch.bool or not whole:
            raise Refused(f"Its shape is {tuple(found.shape)} and its type {found.dtype}.")
        for name, bad in (
            ("NaN", found.isnan()),
            ("infinite", found.isinf() & (not self.infinite)),
            ("too small", found < (-torch.inf if self.at_least is None else self.at_least)),
        ):
            if bool(bad.any()):
                at = bad.nonzero().flatten().tolist()
                raise Refused(f"{len(at):,} of {len(found):,} are {name}, the first at index {at[0]}.")
        return found.to(self.dtype)
