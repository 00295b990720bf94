"""Cases that stand beside the tests that they are about, found without importing those tests."""

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from lightning.pytorch.utilities.seed import isolate_rng

T = TypeVar("T")
TESTS = Path(__file__).parent


class SideOutputs(Mapping[str, T], Generic[T]):
    """What test files name in a dict of literal keys at their top level, such as ``CASES = {"Technique": Case(...)}``.

    Names are read from the files' text; a file is imported when one of its values is asked for, so that a file with cases
    may itself ask for others'. What a file draws while it is imported moves no random state: a run that is the first to ask
    is the same as a second.

    Args:
        homes: the module of each name.
        variable: the dict's name.
    """

    def __init__(self, homes: Mapping[str, str], variable: str) -> None:
        self._homes, self._variable = homes, variable
        self._known: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            with isolate_rng():
                home = importlib.import_module(self._homes[name])
            self._known[name] = getattr(home, self._variable)[name]
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def only(self, names: set[str]) -> "SideOutputs[T]":
        """Those of these names."""
        return SideOutputs({name: home for name, home in self._homes.items() if name in names}, self._variable)


def beside(variable: str, of: str, tests: Path = TESTS) -> dict[str, str]:
    """The module of each name that a test file's top-level dict ``variable`` has, in the names' order.

    Args:
        variable: the dict's name.
        of: the class of its values, by its dotted path: a file that does not import it from there has another dict.
        tests: the folder of the tests.

    Raises:
        ValueError: if two files name the same, or a dict's keys are no literals.
    """
    homes: dict[str, str] = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text()
        if f"\n{variable} = {{" not in text:
            continue
        module = ".".join(path.relative_to(tests.parent).with_suffix("").parts)
        tree = ast.parse(text)
        if of not in _imports(tree):
            continue
        for name in _keys(tree, variable, module):
            if name in homes:
                raise ValueError(
                    f"{variable}: {name} stands in {homes[name]} and in {module}; expected it in one of them."
                )
            homes[name] = module
    return dict(sorted(homes.items()))


def _imports(tree: ast.Module) -> set[str]:
    return {f"{node.module}.{a.name}" for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}


def _keys(tree: ast.Module, variable: str, module: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets) == variable:
            for key in node.value.keys:
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError(
                        f"{module}: a key of {variable} is {key and ast.unparse(key)}; expected a literal name."
                    )
                yield key.value
