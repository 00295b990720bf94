"""Imports go one way, the public names are frozen, and importing costs little and needs no extra."""

import ast
import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_eff

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_eff"
FOLDERS = sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists())

PUBLIC = [
    "ACTPrecision",
    "ActivationCompression",
    "ActivationOffload",
    "Benchmark",
    "CompressedDDPStrategy",
    "DeepSpeedEffStrategy",
    "EfficiencyMonitor",
    "ExactResume",
    "FP8Precision",
    "HybridParallelStrategy",
    "INT8Precision",
    "ImportanceSampling",
    "LatestWeightAveraging",
    "LocalSGD",
    "Muon",
    "OptimizerOffload",
    "ProgressiveLayerDropping",
    "ProgressiveStacking",
    "Rematerialization",
    "S2FP8Precision",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "SharpnessAwareMinimization",
    "StochasticRoundingBF16",
    "Wang2018FP8Precision",
]


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


def test_public_names_are_frozen() -> None:
    assert sorted(lightning_eff.__all__) == PUBLIC
    assert all(hasattr(lightning_eff, name) for name in PUBLIC)
    public = {name for name in vars(lightning_eff) if not name.startswith("_")}
    assert public - set(PUBLIC) <= {*FOLDERS, "cli", "kernels", "report"}, "a name beside the frozen ones"


def test_names_are_imported_when_they_are_asked_for() -> None:
    """What is exported, where it is and what a type checker is told are one list; ``dir`` has all of it."""
    told = {
        name.rpartition(".")[::2] for name in imported(PACKAGE / "__init__.py") if name.rpartition(".")[2] in PUBLIC
    }
    assert {name: home for home, name in told} == lightning_eff._HOMES
    assert set(PUBLIC) <= set(dir(lightning_eff))
    for name, home in lightning_eff._HOMES.items():
        assert getattr(importlib.import_module(home), name) is getattr(lightning_eff, name)
    with pytest.raises(AttributeError, match="module 'lightning_eff' has no attribute 'Rematerialisation'"):
        lightning_eff.Rematerialisation  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="cannot import name 'Rematerialisation'"):
        exec("from lightning_eff import Rematerialisation")


_TAKES = """
from lightning.pytorch import Trainer
for name, cls in (("hybrid", "HybridParallelStrategy"), ("ddp_powersgd", "CompressedDDPStrategy")):
    strategy = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, barebones=True).strategy
    assert type(strategy).__name__ == cls
from lightning.pytorch.strategies import StrategyRegistry
for name in ("deepspeed_zero_2", "hybrid_tp2_pp4", "hybrid_tp8_pp8"):
    assert name in StrategyRegistry.available_strategies()
"""


@pytest.mark.parametrize(
    "code",
    [
        "import sys, lightning_eff; assert not {'torch', 'lightning'} & set(sys.modules)" + _TAKES,
        "import lightning.pytorch, lightning_eff" + _TAKES,
        "from lightning_eff._core.technique import Technique" + _TAKES,
        "import lightning_eff.strategies.deep_speed" + _TAKES,
    ],
    ids=["before Lightning", "after it", "by way of a technique", "by way of a strategy"],
)
def test_strategy_strings_work_after_the_import(code: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("first", ["import lightning_eff", "import lightning.pytorch.cli, lightning_eff"])
def test_a_lightning_cli_of_the_users_own_takes_short_names(first: str) -> None:
    code = f"""
{first}
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
args = ["--trainer.callbacks+=SequenceLengthWarmup", "--trainer.callbacks.start=8", "--trainer.accelerator=cpu"]
cli = LightningCLI(BoringModel, run=False, args=args, save_config_callback=None)
assert isinstance(cli.trainer.callbacks[0], lightning_eff.SequenceLengthWarmup)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


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


@pytest.mark.parametrize("family", [f for f in FOLDERS if f not in ("_core", "bench", "monitor", "planner", "tune")])
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


def test_import_needs_no_extra() -> None:
    """``import lightning_eff`` works where no extra is installed; torchmetrics itself looks for some of them."""
    code = """
import sys, lightning
for name in ("triton", "deepspeed", "bitsandbytes", "peft", "transformers", "jsonargparse", "sklearn"):
    for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[loaded]
    sys.modules[name] = None
import lightning_eff
assert lightning_eff.ProgressiveStacking
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


def test_import_loads_little_beside_lightning() -> None:
    """The 0.2 s that an import may cost on top of lightning's is a matter of modules: only our own and a few small ones."""
    code = """
import sys, lightning
before = set(sys.modules)
import lightning_eff
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert set(out.stdout.split()) <= {"lightning_eff"}, out.stdout


def test_files_stay_small() -> None:
    for path in [*files(PACKAGE), *files(ROOT / "kernels"), *files(ROOT / "examples")]:
        assert len(path.read_text().splitlines()) <= 420, path
    for folder in [PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir())]:
        assert len(list(folder.glob("*.py"))) <= 16, folder
