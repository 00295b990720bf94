"""A source tree on the path, not installed, and without what only extras bring: everything imports and the kernels work."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_eff._exports import source_tree

ROOT = Path(__file__).parent.parent
WITHOUT = (
    "triton",
    "deepspeed",
    "bitsandbytes",
    "peft",
    "transformers",
    "jsonargparse",
    "torchao",
    "matplotlib",
    "scipy",
)

# Without `site` no .pth file is read, and so no editable installation; the packages beside it are searched all the same.
CODE = """
import sys
sys.path[:0] = {path!r}
import lightning
for name in {without!r}:
    for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[loaded]
    sys.modules[name] = None
{then}
"""
EVERYTHING = """
import torch, lightning_eff
from lightning_eff.kernels import _launch, group_quantization
import lightning_eff.kernels
assert group_quantization.__file__ == {quantization!r}, group_quantization.__file__
for name in lightning_eff.__all__:
    assert getattr(lightning_eff, name).__name__ == name
packed = group_quantization.quantize(torch.randn(4, 256), 8, 256, seed=1)
assert group_quantization.dequantize(packed).shape == (4, 256)
finders = [f for f in sys.meta_path if type(f).__name__ == "KernelsBesideThePackage"]
assert len(finders) == 1 and finders[0] is sys.meta_path[-1]
assert finders[0].find_spec("kernels") is None and finders[0].find_spec("lightning_eff.other") is None
"""


def run(then: str, tree: Path, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program that has ``tree`` and the installed packages on its path, but no installation of ours."""
    packages = [
        path for path in sys.path if path and Path(path).is_dir() and not (Path(path) / "lightning_eff").is_dir()
    ]
    code = CODE.format(path=[str(tree), *packages], without=without, then=then)
    command = [sys.executable, "-S", "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=tree, timeout=200)


def test_a_tree_works_without_installation_and_extras() -> None:
    then = EVERYTHING.format(quantization=str(ROOT / "kernels" / "group_quantization.py"))
    done = run(then, ROOT, without=WITHOUT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_folder_called_kernels_counts_in_a_tree_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In site-packages another package has that name."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__name__ != "KernelsBesideThePackage"])
    before = list(sys.meta_path)
    (tmp_path / "lightning_eff").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    source_tree.map_kernels(tmp_path / "lightning_eff")
    assert sys.meta_path == before
    (tmp_path / "pyproject.toml").touch()
    for _ in range(2):
        source_tree.map_kernels(tmp_path / "lightning_eff")
        assert sys.meta_path[:-1] == before
    spec = sys.meta_path[-1].find_spec("lightning_eff.kernels", None)
    assert spec is not None and spec.submodule_search_locations == [str(tmp_path / "kernels")]
