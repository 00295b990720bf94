"""Which module of a package imports which, wherever in it the import stands, and the circles among them in words."""

import ast
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: What a module imports of the package: by name, the place in words.
Graph = dict[str, dict[str, str]]


@dataclass(frozen=True)
class _Import:
    name: str
    line: int
    how: str


def graph(folders: Mapping[str, Path]) -> Graph:
    """The imports among all modules of some packages, stubs with them.

    ``from a import b`` imports ``a.b`` where that is a module, else ``a``. A module of another package is imported by way of
    the packages around it, whose ``__init__`` runs, and so these are imported too.

    Args:
        folders: the folder of each package.
    """
    files = {
        path: ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        for package, folder in folders.items()
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.pyi")))
    }
    found: Graph = {name: {} for name in files.values()}
    for path, name in files.items():
        for each in _imports(ast.parse(path.read_text()), found):
            for target in (*_entered(each.name, name), each.name):
                if target in found and target != name:
                    found[name].setdefault(target, f"line {each.line}{each.how}")
    return found


def _imports(tree: ast.Module, modules: Graph) -> Iterator[_Import]:
    """Every import of one of the modules, with where it stands."""

    def walk(node: ast.AST, how: str) -> Iterator[_Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (_Import(alias.name, child.lineno, how) for alias in child.names if alias.name in modules)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    target = name if name in modules else str(child.module)
                    if target in modules:
                        yield _Import(target, child.lineno, how)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, ", in a function")
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, ", for type checkers")
            else:
                yield from walk(child, how)

    return walk(tree, "")


def _entered(target: str, importer: str) -> Iterator[str]:
    """The packages around ``target`` that are not around ``importer``, outermost first."""
    parts = target.split(".")
    around = {".".join(importer.split(".")[:depth]) for depth in range(1, importer.count(".") + 2)}
    yield from (p for depth in range(1, len(parts)) if (p := ".".join(parts[:depth])) not in around)


def circles(imports: Graph) -> list[list[str]]:
    """For every import that is part of a circle the shortest circle with it; each circle once, from its first name on."""
    found: dict[tuple[str, ...], None] = {}
    for importer, targets in imports.items():
        for target in targets:
            path = _path(imports, target, importer)
            if path is not None:
                first = path.index(min(path))
                found[*path[first:], *path[:first]] = None
    return sorted(map(list, found), key=lambda circle: (len(circle), circle))


def _path(imports: Graph, start: str, end: str) -> list[str] | None:
    """The shortest way from module to module, both ends in it."""
    came: dict[str, str | None] = {start: None}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if at == end:
            path: list[str] = []
            step: str | None = at
            while step is not None:
                path.append(step)
                step = came[step]
            return path[::-1]
        for target in imports[at]:
            if target not in came:
                came[target] = at
                queue.append(target)
    return None


def in_words(circle: list[str], imports: Graph) -> str:
    """``a imports b (line 3), which imports a (line 9, in a function)``."""
    steps = zip(circle, (*circle[1:], circle[0]), strict=True)
    return f"{circle[0]} " + ", which ".join(f"imports {b} ({imports[a][b]})" for a, b in steps)
