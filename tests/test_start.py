"""The start page, followed to the letter: what its first step installs is enough for its commands."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "start.md").read_text()
SMALL = """
trainer: {accelerator: cpu, max_steps: 4, val_check_interval: 2, limit_val_batches: 1}
model: {init_args: {dim: 16, num_layers: 2, num_heads: 2, block_size: 32}}
data: {init_args: {block_size: 32, batch_size: 4, max_bytes: 100000}}
"""


def commands(language: str = "bash") -> list[str]:
    return [line for body in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) for line in body.splitlines()]


def extras() -> set[str]:
    (command,) = (line for line in commands() if line.startswith("pip "))
    assert shlex.split(command)[:4] == ["pip", "install", "-c", "constraints.txt"]
    return {name for names in re.findall(r"\[([\w,]+)\]", command) for name in names.split(",")}


def required() -> Iterator[tuple[str, frozenset[str]]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for one in extras() for line in project["optional-dependencies"][one])]
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def installed() -> set[str]:
    """The distributions that step 1 installs, with all that they require."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(required())
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        try:
            lines = metadata.requires(here[0]) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *here[1])):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def link(distribution: str, site: Path) -> None:
    """Make one of this environment's distributions importable there."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return
    for name in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(Path(str(found.locate_file(name))).absolute())


def call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose package is installed into a clean environment."""
    folder = tmp_path_factory.mktemp("start") / "clone"
    for name in ("lightning_eff", "kernels", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    there = folder.parent / "environment"
    venv.create(there, symlinks=True)
    (site,) = there.glob("lib/python*/site-packages")
    for name in installed():
        link(name, site)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--quiet", "--no-index", "--no-deps"]
    call([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(folder.parent), str(folder)])
    (wheel,) = folder.parent.glob("*.whl")
    call([*pip, "--python", str(there / "bin" / "python"), "install", *offline, "--no-compile", str(wheel)])
    shutil.rmtree(folder / "lightning_eff")  # what runs is what was installed
    recipe = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "recipe.yaml").write_text(recipe[0])
    (folder / "small.yaml").write_text(SMALL)
    return folder


def run(clone: Path, command: str, *more: str) -> str:
    program, *words = shlex.split(command)
    path = clone.parent / "environment" / "bin" / program
    done = subprocess.run([path, *words, *more], capture_output=True, text=True, cwd=clone, timeout=250)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.timeout(600)  # about a minute, and more on a busy machine
def test_its_commands_run_after_its_installation(clone: Path) -> None:
    fit, bench = (line for line in commands() if line.startswith("lightning-eff "))
    assert "ReplaceOptimizer" in run(clone, fit, "--config", "small.yaml")
    small = bench.replace("examples/gpt/baseline.yaml", "examples/gpt/baseline.yaml,small.yaml")
    assert small.count("small.yaml") == 2
    said = run(
        clone, small, "--budget", "0.5rs", "--seeds", "1", "--rounds", "2", "--evaluations", "2", "--threads", "1"
    )
    assert "report.html" in said
    assert (clone / "lightning_logs" / "bench" / "report.html").is_file()
