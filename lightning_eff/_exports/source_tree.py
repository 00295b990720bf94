"""Make ``lightning_eff.kernels`` importable from a source tree that is not installed.

In the tree, the kernels are a folder next to the package. In an installation, editable or not, they are inside it, and
nothing is done.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "lightning_eff.kernels"


class KernelsBesideThePackage:
    """A finder for the kernels package, last in ``sys.meta_path``, so that an installation takes precedence."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the kernels package, or None for other names."""
        if fullname != NAME:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
        )


def map_kernels(package: Path) -> None:
    """Make ``lightning_eff.kernels`` importable from a tree.

    Args:
        package: the folder of ``lightning_eff``. A folder ``kernels`` next to it only counts together with a
            ``pyproject.toml``, because in site-packages it belongs to another package.
    """
    folder = package.parent / "kernels"
    there = any(isinstance(finder, KernelsBesideThePackage) for finder in sys.meta_path)
    if there or not ((package.parent / "pyproject.toml").is_file() and (folder / "__init__.py").is_file()):
        return
    sys.meta_path.append(KernelsBesideThePackage(folder))


map_kernels(Path(__file__).parent.parent)
