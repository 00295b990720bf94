"""What jsonargparse's messages name as wrong, taken apart."""

import ast
import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

#: The keys of a mapping that stands for an object of a class.
ENTRY = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a config, as jsonargparse words it.

    Attributes:
        text: what is wrong.
        key: where, as ``trainer.callbacks``; empty where that is not said.
        class_path: of the class whose arguments these are, if any.
        given: the value, where it is told apart.
    """

    text: str
    key: str = ""
    class_path: str = ""
    given: str = ""

    @property
    def unknown(self) -> str:
        """The argument that is not accepted, dotted where it has parts; empty where that is not the fault."""
        match = re.match(r"(?:Option '([^']+)' is not accepted|Key '([^']+)' is not expected)", self.text)
        return match[1] or match[2] if match else ""


def faults(message: str, given: str = "") -> list[Fault]:
    """What a message of jsonargparse names as wrong, the alternatives of a union one by one; ``given`` is the value."""
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
    """A bullet's text, whose later lines are indented below the first."""
    head, newline, rest = text.partition("\n")
    if at_start and text[:1].isspace():
        return textwrap.dedent(text)
    return head + newline + textwrap.dedent(rest)


def misshapen(fault: Fault) -> dict[str, Any] | None:
    """The mapping that was to stand for an object of a class, if the fault is of its keys."""
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
    """The key of an entry that ``key`` is a slip of, or an empty string."""
    near = difflib.get_close_matches(str(key), ENTRY, n=1, cutoff=0.8)
    return near[0] if near and key not in ENTRY else ""


class _Namespaces(ast.NodeTransformer):
    """``Namespace(a=1)`` as ``{'a': 1}``."""

    @override
    def visit_Call(self, node: ast.Call) -> ast.AST:
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys, [self.visit(keyword.value) for keyword in node.keywords])


def _value(text: str) -> Any:
    """The value that ``text`` shows, None where it shows more than plain ones."""
    try:
        return ast.literal_eval(_Namespaces().visit(ast.parse(text, mode="eval")).body)
    except (SyntaxError, ValueError):
        return None


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """The mappings in a value, the outer ones first."""
    if isinstance(value, Mapping):
        yield dict(value)
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _mappings(part)
