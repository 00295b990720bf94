"""The public names and where they are, as ``__init__.pyi`` lists them: the one list, which type checkers read too.

Modules of the package that need a name by its text ask here, since none of them may import the package as a whole.
"""

import ast
import pkgutil
from importlib import import_module
from types import FrameType
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
    raise AttributeError(f"module 'lightning_eff' has no attribute {name!r}.{_near(name)}")


def version() -> str:
    """The version of the installed distribution."""
    from importlib import metadata  # 20 ms, which few imports need

    return metadata.version("lightning-eff")


def check_imported(name: str, asking: FrameType) -> None:
    """Raise the ``ImportError`` of ``from lightning_eff import name`` with the name that was meant.

    Python replaces what a module's ``__getattr__`` says by a message of its own, except for an ``ImportError``.

    Args:
        name: the name that is asked for.
        asking: the frame that asks for it. Other statements than an import are left to their ``AttributeError``.
    """
    import dis

    listed = name in HOMES or name in FOLDERS
    if not listed and dis.opname[asking.f_code.co_code[asking.f_lasti]] == "IMPORT_FROM":
        raise ImportError(f"cannot import name {name!r} from 'lightning_eff'.{_near(name)}", name="lightning_eff")


def _near(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [*HOMES, *FOLDERS], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
