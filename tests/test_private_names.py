"""Private names of other libraries: those that the code uses are on the list, and those on the list are there."""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lightning_eff
from tests.private_names import IMPORTED, INTERNALS, ON_MODULES_AND_CLASSES, ON_OBJECTS, OTHERS

ROOT = Path(lightning_eff.__file__).parent
LIBRARIES = ("torch", "lightning", "torchmetrics")
FOLDERS = ("strategies/", "_core/", "precision/", "memory/")  # what training stands on


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of the libraries that are imported and private, or lie in private modules."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (n for n in names if n.split(".")[0] in LIBRARIES and any(map(private, n.split("."))))


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that the file makes: functions, classes, variables, attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _self(node):
            yield node.attr


def _self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def accessed(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private attributes that are read or set and that none of our own files makes; of a library's modules, any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            of_library = ast.unparse(node.value).split(".")[0] in (*LIBRARIES, "dist")
            if of_library or node.attr not in own:
                yield node.attr


@cache  # not as the file is imported, which all that is collected would wait for
def texts() -> dict[str, str]:
    """Our own files."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


@cache
def files() -> dict[str, ast.AST]:
    return {file: ast.parse(text) for file, text in texts().items()}


@cache
def own() -> set[str]:
    """The private names that our own files make."""
    return {name for tree in files().values() for name in defined(tree)}


def users(name: str) -> list[str]:
    """The files that name it."""
    return [file for file, text in texts().items() if name in text]


def check_listed(trees: dict[str, ast.AST]) -> None:
    listed = {*ON_MODULES_AND_CLASSES, *ON_OBJECTS, *OTHERS}
    for file, tree in trees.items():
        unlisted = sorted({*imported(tree)} - {*IMPORTED}) + sorted({*accessed(tree, own())} - listed)
        assert not unlisted, (
            f"{file} uses {unlisted}, private names of torch or Lightning that tests/private_names.py does not list; a"
            " release may move them without a word. Take a public name, or add them there."
        )


def test_every_private_name_that_is_used_is_on_the_list() -> None:
    check_listed({file: tree for file, tree in files().items() if file.startswith(FOLDERS)})


@pytest.mark.parametrize(
    "code",
    [
        "from torch._new import thing",
        "from torch.nn import _Thing",
        "import torch._new",
        "torch._new()",
        "x._of_nobody",
    ],
)
def test_a_private_name_that_is_not_listed_is_found(code: str) -> None:
    with pytest.raises(AssertionError, match="private names of torch or Lightning"):
        check_listed({"new.py": ast.parse(code)})


def test_every_name_on_the_list_is_used() -> None:
    unused = [
        n
        for n in (*IMPORTED, *ON_MODULES_AND_CLASSES, *ON_OBJECTS, *INTERNALS, *OTHERS)
        if not users(n.rpartition(".")[2])
    ]
    assert not unused, f"tests/private_names.py lists {unused}, which nothing uses any more; take them out"


def missing(name: str, where: str) -> str:
    return (
        f"{where} has no {name} in the installed release; {', '.join(users(name))} of lightning_eff use it. Look where it"
        " went, or whether there is a public name now, and mend these files and tests/private_names.py."
    )


def found(path: str) -> Any:
    """What "module:Class" or "module" names."""
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError:  # a namespace that is no module: torch.ops.aten
        parent, _, last = module.rpartition(".")
        value = getattr(importlib.import_module(parent), last)
    return getattr(value, name) if name else value


@pytest.mark.parametrize("full", IMPORTED)
def test_imported_names_are_where_they_are_imported_from(full: str) -> None:
    module, _, name = full.rpartition(".")
    try:
        there = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        there = False
    assert there, missing(name, module)


@pytest.mark.parametrize("name", ON_MODULES_AND_CLASSES)
def test_names_on_modules_and_classes_are_there(name: str) -> None:
    assert hasattr(found(ON_MODULES_AND_CLASSES[name]), name), missing(name, ON_MODULES_AND_CLASSES[name])


@pytest.mark.parametrize("name", [*ON_OBJECTS, *INTERNALS])
def test_names_on_objects_are_there(name: str) -> None:
    there = (ON_OBJECTS | INTERNALS)[name]()
    assert hasattr(there, name), missing(name, f"an object of {type(there).__name__}")


def test_a_name_that_moved_is_told_in_words() -> None:
    said = missing("_get_fsdp_state", "torch.distributed.fsdp:FSDPModule")
    assert "_hybrid/sharding.py" in said and "public name" in said
