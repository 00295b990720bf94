"""Imports go one way, the public names are frozen, and importing costs little and needs no extra."""

import ast
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_eff
from lightning_eff._exports import public
from tests.conftest import Once

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_eff"
FOLDERS = sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists())

STUB = PACKAGE / "__init__.pyi"  # the one list of public names


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it; ``from a import b`` counts as ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("lightning_eff.")}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_the_list_of_public_names_is_whole() -> None:
    """A line for each, of which type checkers, the package itself and its completion all know; and none beside them."""
    _, *lines, version = ast.parse(STUB.read_text()).body
    assert ast.unparse(version) == "__version__: str"
    assert all(isinstance(line, ast.ImportFrom) and len(line.names) == 1 for line in lines)
    listed = {line.names[0].name: line.module for line in lines}  # pyright: ignore[reportAttributeAccessIssue]
    assert len(listed) == len(lines), "a name that stands twice"
    assert all(line.names[0].asname == line.names[0].name for line in lines)  # pyright: ignore[reportAttributeAccessIssue]
    assert listed == {**public.HOMES, **dict.fromkeys(public.FOLDERS, "lightning_eff")}
    assert sorted(lightning_eff.__all__) == sorted(public.HOMES)
    assert set(listed) <= set(dir(lightning_eff))
    bare = {name for name in vars(lightning_eff) if not name.startswith("_")}
    assert bare - set(listed) <= {*FOLDERS, "cli"}, "a name beside the listed ones"


@pytest.mark.parametrize("name", sorted(public.HOMES))
def test_a_public_name_is_imported_from_where_it_stands_when_it_is_asked_for(name: str) -> None:
    found = getattr(lightning_eff, name)
    assert (found.__module__, found.__name__) == (public.HOMES[name], name)


def test_a_name_that_is_not_listed_is_no_attribute() -> None:
    meant = r"\. Did you mean 'Rematerialization'\?"
    with pytest.raises(AttributeError, match=f"module 'lightning_eff' has no attribute 'Rematerialisation'{meant}"):
        lightning_eff.Rematerialisation  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match=f"cannot import name 'Rematerialisation' from 'lightning_eff'{meant}"):
        exec("from lightning_eff import Rematerialisation")
    with pytest.raises(ImportError, match=r"cannot import name 'Zzz' from 'lightning_eff'\.$"):
        exec("from lightning_eff import Zzz")
    assert not hasattr(lightning_eff, "Rematerialisation")
    for name in public.FOLDERS:
        assert getattr(lightning_eff, name) is importlib.import_module(f"lightning_eff.{name}")


def test_a_package_without_its_list_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public.pkgutil, "get_data", lambda package, name: (ROOT / name).read_bytes())
    with pytest.raises(ImportError, match=r"lightning_eff/__init__\.pyi cannot be read; expected it beside"):
        public._listed()


@pytest.mark.slow
def test_a_type_checker_knows_the_names_and_what_they_are(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import lightning_eff\n"
        "from lightning_eff import SharpnessAwareMinimization\n"
        "reveal_type(SharpnessAwareMinimization(rho=0.1).neutral)\n"
        "lightning_eff.Rematerialisation\n"
        "lightning_eff.ProgressiveStacking(staged=[])\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path), str(program)],
        capture_output=True,
        text=True,
    )
    told = [line.partition(" - ")[2] for line in done.stdout.splitlines() if "program.py:" in line]
    bool_, unknown, argument = told
    assert 'is "bool"' in bool_
    assert '"Rematerialisation" is not a known attribute of module' in unknown
    assert 'No parameter named "staged"' in argument


_TAKES = """
from lightning.pytorch import Trainer
for name, cls in (("hybrid", "HybridParallelStrategy"), ("ddp_powersgd", "CompressedDDPStrategy")):
    strategy = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, barebones=True).strategy
    assert type(strategy).__name__ == cls
from lightning.pytorch.strategies import StrategyRegistry
for name in ("deepspeed_zero_2", "hybrid_tp2_pp4", "hybrid_tp8_pp8"):
    assert name in StrategyRegistry.available_strategies()
"""


_CLI = """
import lightning_eff
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
args = ["--trainer.callbacks+=SequenceLengthWarmup", "--trainer.callbacks.start=8", "--trainer.accelerator=cpu"]
cli = LightningCLI(BoringModel, run=False, args=args, save_config_callback=None)
assert isinstance(cli.trainer.callbacks[0], lightning_eff.SequenceLengthWarmup)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import sys, lightning_eff; assert not {'torch', 'lightning'} & set(sys.modules)" + _TAKES + _CLI,
        "from lightning_eff._core.technique import Technique" + _TAKES,
        "import lightning_eff.strategies.deep_speed" + _TAKES,
    ],
    ids=["before Lightning", "by way of a technique", "by way of a strategy"],
)
def test_strategy_strings_and_a_cli_of_the_users_own_work_after_the_import(code: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


#: in a process that has imported ``lightning``, each by itself
_AFTER_LIGHTNING = {
    "strategy strings": "import lightning.pytorch, lightning_eff" + _TAKES,
    "a LightningCLI of the user's own": "import lightning.pytorch.cli, lightning_eff" + _CLI,
    # torchmetrics itself looks for some of the extras
    "no extra": """
import sys
for name in ("triton", "deepspeed", "bitsandbytes", "peft", "transformers", "jsonargparse", "sklearn"):
    for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[loaded]
    sys.modules[name] = None
import lightning_eff
assert lightning_eff.ProgressiveStacking
""",
    # the 0.2 s that an import may cost on top of Lightning's is a matter of modules: few, and as few with more names
    "loads little": """
import sys
before = set(sys.modules)
import lightning_eff
own = {f"lightning_eff{name}" for name in ("", ".strategies", "._core", "._exports")}
own |= {f"lightning_eff._exports.{name}" for name in ("lazy", "public", "source_tree")}
own |= {f"lightning_eff._core._lightning{name}" for name in ("", ".imports")}
more = set(sys.modules) - before - own - {"lightning_eff.strategies._names"}
assert not more, more
""",
}


@pytest.fixture(scope="module")
def after_lightning(once: Once) -> dict[str, str]:
    """What each of these printed in a fork of one process, whose import of Lightning takes seconds; empty if it is right."""
    code = """
import json, os, sys, traceback, lightning
assert not any(name.startswith("lightning_eff") for name in sys.modules)
found = {}
for name, text in json.loads(sys.stdin.read()).items():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        told = ""
        try:
            exec(text, {})
        except BaseException:
            told = traceback.format_exc()[-1000:]
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        found[name] = stream.read()
    status = os.waitpid(child, 0)[1]
    found[name] = found[name] or (f"ended with {status}" if status else "")
print()
print(json.dumps(found))
"""

    def run() -> dict[str, str]:
        out = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            check=True,
            cwd=ROOT,
            input=json.dumps(_AFTER_LIGHTNING),
            capture_output=True,
            text=True,
        )
        return json.loads(out.stdout.splitlines()[-1])

    return once("after_lightning", run)


@pytest.mark.parametrize("what", sorted(_AFTER_LIGHTNING))
def test_after_lightning_the_import_brings(what: str, after_lightning: dict[str, str]) -> None:
    assert after_lightning[what] == ""


def test_an_import_that_fails_is_waited_for_again(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import sys; assert 'ready' in sys.modules")
    code = """
import sys
from lightning_eff import _lazy
calls = []
_lazy.once_imported("late", lambda: calls.append(1))
try: import late
except AssertionError: pass
assert not calls
sys.modules["ready"] = sys
import late, inspect
assert calls == [1] and "ready" in inspect.getsource(late)
_lazy.once_imported("late", lambda: calls.append(2))
assert calls == [1, 2] and not any(type(f).__name__ == "_Waiting" and f._name == "late" for f in sys.meta_path)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_kernels_import_torch_and_triton_only() -> None:
    for path in files(ROOT / "kernels"):
        outside = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names
        assert outside <= {"torch", "triton", "lightning_eff"} and ours(imported(path)) <= {"kernels"}, path
        assert "lightning_eff" not in imported(path), f"{path} imports the package as a whole"


def test_core_knows_no_technique() -> None:
    for path in files(PACKAGE / "_core"):
        assert ours(imported(path)) <= {"_core"}, path


#: Folders that are no rooms of techniques: what techniques stand on, and what sees all of them, as the command line does.
NO_ROOMS = ("_cli", "_core", "_catalogue", "_exports", "advice", "bench", "monitor", "planner", "recipes", "tune")


@pytest.mark.parametrize("family", [f for f in FOLDERS if f not in NO_ROOMS])
def test_a_technique_imports_core_kernels_and_its_own_rooms_shared_pieces(family: str) -> None:
    """What a room, or the family that it is a room of, shares begins with an underscore; all else there is a technique."""
    for path in files(PACKAGE / family):
        home = room_of(path)
        taken = {tuple(n.split(".")[1:]) for n in imported(path) if n.startswith("lightning_eff.")}
        wrong = {n for n in taken if n[0] not in ("_core", "kernels") and not shared_with(home, n)}
        assert not wrong, f"{path} may use lightning_eff._core, kernels and what {'/'.join(home)} shares, not {wrong}"


def room_of(path: Path) -> tuple[str, ...]:
    """The folder of techniques that a file stands in or is shared by: ``("data", "selection")``, ``("memory",)``."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    return tuple(itertools.takewhile(lambda part: not part.startswith("_"), folders))


def shared_with(room: tuple[str, ...], name: tuple[str, ...]) -> bool:
    """Whether a dotted name, in parts, is of something that the room or one around it shares, or that folder itself."""
    folders = [room[:depth] for depth in range(1, len(room) + 1)]
    return any(name == f or (name[: len(f)] == f and name[len(f)].startswith("_")) for f in folders)


def test_the_monitor_knows_no_technique() -> None:
    for path in files(PACKAGE / "monitor"):
        assert ours(imported(path)) <= {"_core", "monitor"}, path


def test_nothing_imports_examples_or_tests() -> None:
    for path in [*files(PACKAGE), *files(ROOT / "kernels")]:
        assert not {name.split(".")[0] for name in imported(path)} & {"examples", "tests", "benchmarks"}, path


def test_examples_never_import_the_package() -> None:
    modules = files(ROOT / "examples")
    assert modules
    for path in modules:
        assert not any(name.split(".")[0] == "lightning_eff" for name in imported(path)), path
        assert "lightning_eff" not in path.read_text(), path


def test_draws_that_are_compared_say_their_type() -> None:
    """Under ``16-true`` and ``bf16-true`` the default type is another one in a forward pass than in a backward pass, and a
    number of eight bits lies below a probability more often, or less often, than the probability says."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.rand"
        if not {"dtype", "out"} & {word.arg for word in node.keywords}
    ]
    assert silent == []


def test_only_one_module_asks_whether_something_is_of_a_class_of_lightnings() -> None:
    """A class of ``lightning.pytorch`` is none of ``pytorch_lightning``: ``_core._lightning.names`` knows both."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files(PACKAGE)
        if path != PACKAGE / "_core" / "_lightning" / "names.py"
        for line in asked_of_one_package(ast.parse(path.read_text()))
    ]
    assert wrong == [], (
        "use is_a, is_subclass, is_exactly, is_overridden or like of lightning_eff._core._lightning.names"
    )


def asked_of_one_package(tree: ast.AST) -> list[int]:
    """Lines with isinstance, issubclass, ``type(x) is`` or ``except`` of a Lightning class, with Lightning's own
    ``is_overridden``, or with the name of one package alone."""
    theirs: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            theirs |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            theirs |= {a.asname or "lightning" for a in node.names if a.name.split(".")[0] == "lightning"}
    for node in ast.walk(tree):  # tuples of them, by name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and named(node.value) & theirs:
            theirs |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    found: list[int] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            asked: set[str] = named(node.args[1])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            asked = set() if named(node) & {"like", "both"} else named(node)
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            asked = named(node.type)
        elif isinstance(node, ast.Constant) and node.value == "lightning.":  # of ``__module__``
            found.append(node.lineno)
            continue
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            asked = {alias.name for alias in node.names} & {"is_overridden"}
            theirs |= asked
        else:
            continue
        if asked & theirs:
            found.append(node.lineno)
    return found


def named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def test_what_asks_of_one_package_is_found() -> None:
    code = """
from lightning.pytorch import Trainer as T, Callback
import lightning.pytorch as pl
KINDS = (Callback, int)
isinstance(x, T)
issubclass(x, int | pl.LightningModule)
isinstance(x, KINDS)
type(x) is T
try: pass
except pl.utilities.exceptions.MisconfigurationException: pass
from lightning.pytorch.utilities.model_helpers import is_overridden
x is like(y, T)
is_a(x, T)
type(x).__module__.startswith("lightning.")
"""
    assert sorted(asked_of_one_package(ast.parse(code))) == [5, 6, 7, 8, 10, 11, 14]


def test_files_stay_small() -> None:
    for path in [*files(PACKAGE), *files(ROOT / "kernels"), *files(ROOT / "examples")]:
        assert len(path.read_text().splitlines()) <= 420, path
    for folder in [PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir())]:
        assert len(list(folder.glob("*.py"))) <= 16, folder
