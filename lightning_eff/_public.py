"""The public names and where they are, as ``__init__.pyi`` lists them: the one list, which type checkers read too.

Modules of the package that need a name by its text ask here, since none of them may import the package as a whole.
"""

import ast
import pkgutil
from importlib import import_module
from typing import Any


def imports(stub: str) -> dict[str, str]:
    """The names that a stub's lines ``from home import name as name`` give, each with its home."""
    found = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names}


def _listed() -> dict[str, str]:
    try:
        stub = pkgutil.get_data("lightning_eff", "__init__.pyi")
    except OSError as error:
        raise ImportError(
            "lightning_eff/__init__.pyi cannot be read; expected it beside __init__.py, since it lists the public names."
            " Whatever packs the package into a file of its own must take .pyi files along."
        ) from error
    return imports((stub or b"").decode())


_LISTED = _listed()
#: Where each public name is.
HOMES: dict[str, str] = {name: home for name, home in _LISTED.items() if home != "lightning_eff"}
#: The package's folders that are attributes of it without having been imported.
FOLDERS = frozenset(_LISTED) - frozenset(HOMES)


def found(name: str) -> Any:
    """What a name of the list stands for; its module is imported if it has not been.

    Raises:
        AttributeError: for a name that is not listed.
    """
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    if name in FOLDERS:
        return import_module(f"lightning_eff.{name}")
    raise AttributeError(f"module 'lightning_eff' has no attribute {name!r}")
