"""Call a function when a module has been imported."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override


def once_imported(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` as soon as the module ``name`` has been imported by any code; now, if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        call()
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder):
    """A finder that finds nothing itself, but runs a call after the next import of one module."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # the other finders find it
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader: Any = spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            try:
                loader.exec_module(module)
            except BaseException:
                sys.meta_path.insert(0, self)  # the import may be tried again
                raise
            self._call()

        loader.exec_module = exec_module
        return spec
