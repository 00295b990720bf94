"""Finds hooks that read gradients or parameters by inspecting their code, before the model is divided.

If a hook computes a norm over its own stage, or a number from a piece, the result is wrong without an error. For example,
``float`` of a DTensor's norm is that of the local piece. So setup inspects the names in the code of hooks, and of the user's
functions that they call.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from lightning_eff._core._lightning.names import ROOTS

_LIBRARIES = (
    "torch",
    *ROOTS,
    "lightning_eff",
    "torchmetrics",
    "transformers",
)
_LISTS = ("parameters", "named_parameters", "state_dict")
_VALUES = {  # operations that reduce whole tensors; all others act on elements and are right on pieces
    *(
        "item",
        "tolist",
        "numpy",
        "norm",
        "vector_norm",
        "matrix_norm",
        "get_total_norm",
        "_foreach_norm",
        "dist",
        "histc",
    ),
    *("sum", "mean", "std", "var", "median", "quantile", "max", "min", "amax", "amin", "prod", "count_nonzero", "dot"),
    *("any", "all", "isnan", "isinf", "isfinite", "equal", "allclose", "save", "cpu", "cosine_similarity", "histogram"),
    *("add_histogram", "log", "log_dict", "cat", "stack", "parameters_to_vector"),
}
_BUILTINS = {"float", "bool", "print"}  # not sum or max, which are as often used for Python's numbers


@dataclass
class Reads:
    """The gradients and parameters that one hook reads.

    Attributes:
        gradients: place where ``.grad`` is read and reduced to a number, or None.
        parameters: place where parameters are read and reduced to a number, or None.
        lists: place where parameters are listed for a purpose other than norms or element-wise changes of gradients.
        norms: functions that compute or clip norms.
        namespaces: namespaces of the inspected functions.
        cells: variables of their closures.
    """

    gradients: str | None = None
    parameters: str | None = None
    lists: str | None = None
    norms: list[Callable[..., Any]] = field(default_factory=list[Callable[..., Any]])
    namespaces: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cells: list[CellType] = field(default_factory=list[CellType])


def hooks_of(owner: object, names: Iterable[str]) -> Iterator[tuple[str, list[FunctionType]]]:
    """Yield each of the hooks ``names`` that the user wrote on ``owner``, with its functions and those of base classes."""
    for name in names:
        found = _written(owner, name)
        if found:
            yield name, found


def library(function: Any) -> bool:
    """Whether ``function`` belongs to a trusted library."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _written(owner: object, name: str) -> list[FunctionType]:
    held = getattr(owner, "__dict__", {}).get(name)
    found = [] if held is None else [held]
    found += [cls.__dict__[name] for cls in type(owner).__mro__ if name in cls.__dict__]
    return [f for f in (_function(each) for each in found) if f is not None and not library(f)]


def _function(found: Any) -> FunctionType | None:
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else found
    found = found.__func__ if isinstance(found, MethodType) else found
    return found if isinstance(found, FunctionType) else None


class Reader:
    """Inspects functions.

    Args:
        norms: functions that compute norms over parameters.
        owners: objects whose methods hooks can call.
        keys: names of parameters in their modules, such as "weight".
    """

    def __init__(self, norms: Iterable[Callable[..., Any]], owners: Iterable[object], keys: Iterable[str]) -> None:
        self._norms = {id(f): f for f in norms}
        self._owners = list({type(owner): owner for owner in owners if not library(type(owner))}.values())
        self._keys = set(keys)

    @classmethod
    def of(cls, module: nn.Module, owner: object, norms: Iterable[Callable[..., Any]]) -> "Reader":
        """Create a reader for the hooks of ``owner`` in a run of ``module``."""
        return cls(norms, [owner, *module.modules()], {name for m in module.modules() for name in m._parameters})

    def read(self, functions: Iterable[FunctionType]) -> Reads:
        """Return what ``functions`` and the functions that they call read."""
        found, seen, todo = Reads(), set[int](), list(functions)
        while todo:
            function = todo.pop()
            if id(function.__code__) not in seen:
                seen.add(id(function.__code__))
                todo += self._one(function, found)
        return found

    def _one(self, function: FunctionType, found: Reads) -> list[FunctionType]:
        """Add what one function reads to ``found``, and return the functions that it calls."""
        where = f"{function.__qualname__} ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"
        calls: list[FunctionType] = []
        norms: list[Callable[..., Any]] = []
        named: set[str] = set()
        attributes: list[str] = []
        for code in _codes(function.__code__):
            for name, value, is_attribute in _names(code, function):
                named.add(name)
                if is_attribute:
                    attributes.append(name)
                if id(value) in self._norms:
                    norms.append(value)
                elif value is None and is_attribute:
                    norms += [f for f in self._norms.values() if f.__name__ == name]
                    calls += [f for owner in self._owners for f in _written(owner, name)]
                elif (called := _function(value)) is not None and not library(called):
                    calls.append(called)
        found.norms += norms
        found.namespaces.append(function.__globals__)
        found.cells += function.__closure__ or ()
        values = bool(_VALUES & set(attributes) or _BUILTINS & named)
        if "grad" in attributes and values:
            found.gradients = found.gradients or where
        listed = sum(name in _LISTS for name in attributes) + ("params" in named)
        if listed > len(norms) and "grad" not in attributes:
            found.lists = found.lists or where
        if values and (listed > len(norms) or self._keys & set(attributes)):
            found.parameters = found.parameters or where
        return calls


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of its comprehensions and inner functions."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _names(code: CodeType, function: FunctionType) -> Iterator[tuple[str, Any, bool]]:
    """Yield the names that ``code`` loads, each with its value (None if unknown) and whether it is an attribute.

    A string (``getattr(p, "grad")``, ``group["params"]``) counts as an attribute.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    now: Any = None  # the value loaded last, whose attribute can come next
    for at in dis.get_instructions(code):
        name, before, now = at.argval, now, None
        if at.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            now = function.__globals__.get(name)
            yield name, now, False
        elif at.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
            now = _content(cells[name])
            yield name, now, False
        elif at.opname == "IMPORT_NAME":
            now = sys.modules.get(name)
        elif at.opname == "IMPORT_FROM":
            now = before
            yield name, _within(before, name), False
        elif at.opname in ("STORE_FAST", "STORE_NAME", "STORE_DEREF"):
            now = before  # between the names of one import
        elif at.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            now = _within(before, name)
            if not (name == "grad" and isinstance(before, ModuleType)):  # torch.autograd.grad
                yield name, now, True
        elif at.opname == "LOAD_CONST" and name in ("grad", "params"):
            yield name, None, True


def _within(module: Any, name: str) -> Any:
    return getattr(module, name, None) if isinstance(module, ModuleType) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
