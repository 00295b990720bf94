"""What a run's hooks read of gradients and parameters, found in their code, before each process has only a part of them.

A norm that a hook takes over its own stage, or the number in a piece (``float`` of a DTensor's norm is that of the local
piece), is wrong in silence. So hooks are looked through at setup: what their functions name, and the functions that they
call, as far as those are the user's own.
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
_VALUES = {  # what makes numbers of whole tensors; all else acts element by element, and is right on pieces
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
_BUILTINS = {"float", "bool", "print"}  # sum, max and the like are of Python's numbers as often


@dataclass
class Reads:
    """What one hook reads.

    Attributes:
        gradients: where ``.grad`` is read together with something that makes a number of it; None if nowhere.
        parameters: likewise for parameters.
        lists: where parameters are listed at all, beyond what the norms take, and for another purpose than to change their
            gradients element by element.
        norms: the functions that take or clip norms.
        namespaces: in which the functions that were looked through find what they name.
        cells: the closures' variables that they name.
    """

    gradients: str | None = None
    parameters: str | None = None
    lists: str | None = None
    norms: list[Callable[..., Any]] = field(default_factory=list[Callable[..., Any]])
    namespaces: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cells: list[CellType] = field(default_factory=list[CellType])


def hooks_of(owner: object, names: Iterable[str]) -> Iterator[tuple[str, list[FunctionType]]]:
    """Each of the hooks ``names`` that the user wrote on ``owner``, with its functions, those of parents included."""
    for name in names:
        found = _written(owner, name)
        if found:
            yield name, found


def library(function: Any) -> bool:
    """Whether ``function`` comes with a library that knows what it does."""
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
    """Looks through functions.

    Args:
        norms: the functions that take norms over parameters, as the user may have imported them.
        owners: objects whose methods hooks may call.
        keys: the names of parameters within their modules, such as "weight".
    """

    def __init__(self, norms: Iterable[Callable[..., Any]], owners: Iterable[object], keys: Iterable[str]) -> None:
        self._norms = {id(f): f for f in norms}
        self._owners = list({type(owner): owner for owner in owners if not library(type(owner))}.values())
        self._keys = set(keys)

    @classmethod
    def of(cls, module: nn.Module, owner: object, norms: Iterable[Callable[..., Any]]) -> "Reader":
        """For the hooks of ``owner`` in a run of ``module``."""
        return cls(norms, [owner, *module.modules()], {name for m in module.modules() for name in m._parameters})

    def read(self, functions: Iterable[FunctionType]) -> Reads:
        """What ``functions`` read, and those that they call."""
        found, seen, todo = Reads(), set[int](), list(functions)
        while todo:
            function = todo.pop()
            if id(function.__code__) not in seen:
                seen.add(id(function.__code__))
                todo += self._one(function, found)
        return found

    def _one(self, function: FunctionType, found: Reads) -> list[FunctionType]:
        """Add what one function reads; returns those that it calls."""
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
    """``code`` and what is defined in it (comprehensions, inner functions)."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _names(code: CodeType, function: FunctionType) -> Iterator[tuple[str, Any, bool]]:
    """Names that ``code`` loads: each with what it stands for, None if that is not known, and whether it is an attribute.

    A word in quotes (``getattr(p, "grad")``, ``group["params"]``) counts as an attribute.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    now: Any = None  # what was loaded last, whose attribute comes next
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
