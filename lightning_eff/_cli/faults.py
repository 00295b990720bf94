"""Parses jsonargparse's error messages."""

import ast
import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

#: The keys of a mapping that describes an object.
ENTRY = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True)
class Fault:
    """One error in a config.

    Attributes:
        text: jsonargparse's description.
        key: place in the config, such as ``trainer.callbacks``, or empty if unknown.
        class_path: class whose arguments are wrong, if any.
        given: the given value, if the message has it.
    """

    text: str
    key: str = ""
    class_path: str = ""
    given: str = ""

    @property
    def unknown(self) -> str:
        """The unknown argument, dotted if nested, or an empty string for other errors."""
        match = re.match(r"(?:Option '([^']+)' is not accepted|Key '([^']+)' is not expected)", self.text)
        return match[1] or match[2] if match else ""


def faults(message: str, given: str = "") -> list[Fault]:
    """Return the errors in a message of jsonargparse, one for each alternative of a union; ``given`` is the value."""
    text = textwrap.dedent(message).strip()
    head, _, rest = text.partition("\n")
    if text.startswith("- "):
        parts = re.split(r"(?:^|\n)- ", text)[1:]
        return [fault for part in parts for fault in faults(_continued(part), given)]
    if match := re.match(r'Parser key "([^"]+)":\s*', text):
        inner = faults(_continued(text[match.end() :], at_start=True))
        return [replace(f, key=f"{match[1]}.{f.key}" if f.key else match[1]) for f in inner]
    if head.startswith("Does not validate against any of the Union subtypes"):
        errors, _, tail = rest.partition("\nErrors:\n")[2].rpartition("\nGiven value type:")
        given = tail.partition("\nGiven value: ")[2]
        return [fault if fault.given else replace(fault, given=given) for fault in faults(errors, given)]
    if match := re.match(r"Problem with given class_path '([^']+)':\n", text):
        return [f if f.class_path else replace(f, class_path=match[1]) for f in faults(text[match.end() :])]
    callable_class = r"Type .+? expects a function or a callable class: (.+?)(?:\. Got value: (Namespace\(.*))?"
    if match := re.fullmatch(callable_class, text, re.S):
        path = re.search(r"class_path'?[=:] ?'([\w.]+)'|^([A-Za-z_][\w.]*)$", match[2] or given)
        name = (path[1] or path[2]) if path else ""
        return [f if f.class_path else replace(f, class_path=name) for f in faults(match[1].rstrip("."), given)]
    return [Fault(text)]


def _continued(text: str, *, at_start: bool = False) -> str:
    """Remove the indentation of a bullet's later lines."""
    head, newline, rest = text.partition("\n")
    if at_start and text[:1].isspace():
        return textwrap.dedent(text)
    return head + newline + textwrap.dedent(rest)


def misshapen(fault: Fault) -> dict[str, Any] | None:
    """Return the mapping that should describe an object, if its keys are wrong."""
    asked = fault.unknown.partition(".")[0]
    shapeless = fault.text.startswith(
        ("Not a valid subclass of", "Dict must include a class_path", "Expected 'typing.Any' to be")
    )
    value = _value(fault.given) if asked or shapeless else None
    for entry in value if isinstance(value, list) else [value]:  # keyed by its class
        if isinstance(entry, dict) and list(entry) == [asked] and asked[0].isupper():
            return entry
    for entry in _mappings(value):
        by_slip = shapeless and any(map(entry_key, entry))
        if by_slip or ("class_path" in entry and asked in entry and not set(entry).issubset(ENTRY)):
            return entry
    return None


def entry_key(key: Any) -> str:
    """Return the key of :data:`ENTRY` that ``key`` misspells, or an empty string."""
    near = difflib.get_close_matches(str(key), ENTRY, n=1, cutoff=0.8)
    return near[0] if near and key not in ENTRY else ""


class _Namespaces(ast.NodeTransformer):
    """Turns ``Namespace(a=1)`` into ``{'a': 1}``."""

    @override
    def visit_Call(self, node: ast.Call) -> ast.AST:
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys, [self.visit(keyword.value) for keyword in node.keywords])


def _value(text: str) -> Any:
    """Parse ``text`` as a plain value; return None if it is not one."""
    try:
        return ast.literal_eval(_Namespaces().visit(ast.parse(text, mode="eval")).body)
    except (SyntaxError, ValueError):
        return None


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings in a value, outer ones first."""
    if isinstance(value, Mapping):
        yield dict(value)
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _mappings(part)
