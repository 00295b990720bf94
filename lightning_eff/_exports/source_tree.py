"""A source tree that is not installed: ``lightning_eff.kernels`` is then the folder beside the package.

In the tree the kernels stand at the top, and in an installation, editable or not, inside of the package. Where this file is
part of a tree on ``sys.path`` and nothing else has them, a finder gives them; in an installation nothing is done.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "lightning_eff.kernels"


class KernelsBesideThePackage:
    """An entry of ``sys.meta_path`` that knows one package, asked last, so that an installation's own comes first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The package's spec, or None for every other name. Its modules are then found in its folder, as usual."""
        if fullname != NAME:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
        )


def map_kernels(package: Path) -> None:
    """Make ``lightning_eff.kernels`` importable from a tree.

    Args:
        package: the folder of ``lightning_eff``. A folder ``kernels`` beside it counts only in a tree, which has a
            ``pyproject.toml``: in site-packages another package has that name.
    """
    folder = package.parent / "kernels"
    there = any(isinstance(finder, KernelsBesideThePackage) for finder in sys.meta_path)
    if there or not ((package.parent / "pyproject.toml").is_file() and (folder / "__init__.py").is_file()):
        return
    sys.meta_path.append(KernelsBesideThePackage(folder))


map_kernels(Path(__file__).parent.parent)
