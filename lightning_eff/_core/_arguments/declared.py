"""Check the arguments that a signature declares, and word the message if one is wrong."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, Union, get_args, get_origin

from lightning_eff._core._arguments.kinds import Alias, Flag, Kind, OneOf, Refused

_DECLARED = "_declared_arguments"
P = ParamSpec("P")


@dataclass(frozen=True)
class Argument:
    """One declared argument.

    Attributes:
        kind: the accepted values; None if only other names are declared.
        optional: whether None is accepted too.
        aliases: other names under which it is accepted.
    """

    kind: Kind | None
    optional: bool
    aliases: tuple[str, ...]


def declared(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap ``init`` to check the arguments that its signature declares; the signature stays the same.

    An argument is declared by ``Annotated[float, Fraction(above=0)]``, or by ``bool`` or ``Literal`` alone. Techniques get this
    wrapper automatically. Other classes use it as a decorator of their ``__init__``.

    Raises:
        ValueError: from the wrapped function, for the first wrong argument.
        TypeError: from the wrapped function, if an argument is given under two of its names.
    """
    if hasattr(init, _DECLARED):
        return init
    signature = inspect.signature(init)
    arguments = {name: argument for name, p in signature.parameters.items() if (argument := _argument(p)) is not None}
    if not arguments:
        return init
    own_names = {alias: name for name, argument in arguments.items() for alias in argument.aliases}

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        owner = type(args[0])
        kwargs = renamed(owner.__name__, own_names, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # ``init`` raises a better error
            return init(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        for name, argument in arguments.items():
            if name in bound.arguments:
                bound.arguments[name] = _taken(owner, name, argument, bound.arguments[name], signature)
        return init(*bound.args, **bound.kwargs)  # pyright: ignore[reportCallIssue]

    setattr(checked, _DECLARED, arguments)
    return checked  # pyright: ignore[reportReturnType]


def arguments_of(cls: type) -> Mapping[str, Argument]:
    """Return the declared arguments of a class's constructor, by name."""
    return getattr(cls.__init__, _DECLARED, {})


def aliases_of(cls: type) -> dict[str, str]:
    """Return the arguments of a class's constructor by their other names."""
    return {alias: name for name, argument in arguments_of(cls).items() for alias in argument.aliases}


def renamed(owner: str, own_names: Mapping[str, str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` under the arguments' own names.

    Raises:
        TypeError: if one is given under two names.
    """
    found = dict(kwargs)
    for alias, name in own_names.items():
        if alias in found:
            if name in found:
                raise TypeError(
                    f"{owner}({name}=..., {alias}=...): these are two names of one argument. Give one of them."
                )
            found[name] = found.pop(alias)
    return found


def refusal(cls: type, name: str, value: Any, expected: str, hint: str = "") -> ValueError:
    """Return the error for a wrong argument: ``Name(argument=value): expected ... The default is ...``."""
    default = _default(cls, name)
    meaning = "" if expected.startswith("a function") else meaning_of(cls, name)
    known = "" if default in (inspect.Parameter.empty, None) or hint else f" The default is {default!r}."
    quoted = " Write it without quotes." if isinstance(value, str) and "number" in expected and _numeric(value) else ""
    quoted = f" Write [{value!r}]." if isinstance(value, str) and value and "a list of" in expected else quoted
    return ValueError(
        f"{cls.__name__}({name}={_short(value)}): expected {expected}{': ' + meaning if meaning else ''}."
        f"{quoted}{' ' + hint if hint else ''}{known}"
    )


def meaning_of(cls: type, name: str) -> str:
    """Return the meaning of an argument: the first sentence of its docstring entry, without the range.

    A subclass without an entry uses that of its base.
    """
    doc = "\n\n".join(inspect.cleandoc(base.__doc__ or "") for base in cls.__mro__)
    found = re.search(rf"^ +{re.escape(name)}: (.+?)(?:\.\s|\.$|;|\n\n|\n +\w+: |\n\w+:\n|\Z)", doc, re.S | re.M)
    text = " ".join(found[1].replace("``", "").split()).rstrip(".") if found else ""
    return re.sub(r",? (?:in [(\[]-?\d\S*, \S+[)\]]|(?:[<>]=?|at least|from) -?\d[\d.e-]*(?: on)?)$", "", text)


def _argument(parameter: inspect.Parameter) -> Argument | None:
    annotation, metadata, optional = parameter.annotation, (), False
    for _ in range(3):  # ``X | None`` and ``Annotated`` in either order
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            metadata = (*metadata, *extra)
        if get_origin(annotation) in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            optional |= len(members) < len(get_args(annotation))
            annotation = members[0] if len(members) == 1 else None
    kind = next((one for one in metadata if isinstance(one, Kind)), None)
    if kind is None and annotation is bool:
        kind = Flag()
    if kind is None and get_origin(annotation) is Literal:
        kind = OneOf(*get_args(annotation))
    aliases = tuple(one.name for one in metadata if isinstance(one, Alias))
    return Argument(kind, optional, aliases) if kind is not None or aliases else None


def _taken(owner: type, name: str, argument: Argument, value: Any, signature: inspect.Signature) -> Any:
    if argument.kind is None or (value is None and argument.optional):
        return value
    if value is signature.parameters[name].default:
        return value
    try:
        return argument.kind(value)
    except (ValueError, TypeError) as error:
        expected = argument.kind.expected + (", or None" if argument.optional else "")
        why = str(error) if isinstance(error, Refused) else ""
        hint = f"{why} {getattr(argument.kind, 'hint', '')}".strip()
        raise refusal(owner, name, value, expected, hint) from None


def _default(cls: type, name: str) -> Any:
    """Return the default of an argument where it is declared, because a subclass may only pass it on."""
    for base in cls.__mro__:
        parameter = inspect.signature(vars(base)["__init__"]).parameters.get(name) if "__init__" in vars(base) else None
        if parameter is not None:
            return parameter.default
    return inspect.Parameter.empty


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
