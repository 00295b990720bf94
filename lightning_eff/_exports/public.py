"""The public names and their modules, from ``__init__.pyi``, which is the only list and serves type checkers too.

Modules of the package look up names here, because they may not import the package as a whole.
"""

import ast
import pkgutil
from importlib import import_module
from types import FrameType
from typing import Any


def imports(stub: str) -> dict[str, str]:
    """Return the names and modules of a stub's lines ``from module import name as name``."""
    found = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names}


def _listed() -> dict[str, str]:
    try:
        stub = pkgutil.get_data("lightning_eff", "__init__.pyi")
    except OSError as error:
        raise ImportError(
            "lightning_eff/__init__.pyi cannot be read; expected it beside __init__.py, because it lists the public names."
            " Include .pyi files when you bundle the package."
        ) from error
    return imports((stub or b"").decode())


_LISTED = _listed()
#: The module of each public name.
HOMES: dict[str, str] = {name: home for name, home in _LISTED.items() if home != "lightning_eff"}
#: The package's folders that are its attributes before they are imported.
FOLDERS = frozenset(_LISTED) - frozenset(HOMES)


def found(name: str) -> Any:
    """Return the object of a public name, and import its module if needed.

    Raises:
        AttributeError: for any other name.
    """
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    if name in FOLDERS:
        return import_module(f"lightning_eff.{name}")
    raise AttributeError(f"module 'lightning_eff' has no attribute {name!r}.{_near(name)}")


def version() -> str:
    """Return the version of the installed distribution."""
    from importlib import metadata  # takes 20 ms

    return metadata.version("lightning-eff")


def check_imported(name: str, asking: FrameType) -> None:
    """Raise an ``ImportError`` with a suggestion for ``from lightning_eff import name`` if there is no such name.

    Python replaces other exceptions of a module's ``__getattr__`` with its own message.

    Args:
        name: the requested name.
        asking: the frame that requests it. Only imports are checked.
    """
    import dis

    listed = name in HOMES or name in FOLDERS
    if not listed and dis.opname[asking.f_code.co_code[asking.f_lasti]] == "IMPORT_FROM":
        raise ImportError(f"cannot import name {name!r} from 'lightning_eff'.{_near(name)}", name="lightning_eff")


def _near(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [*HOMES, *FOLDERS], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
