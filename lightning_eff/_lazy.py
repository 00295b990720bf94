"""What ``import lightning_eff`` puts off: classes until they are asked for, strategy strings until Lightning is there.

Nothing heavy is imported here: ``lightning-eff plan`` looks at its arguments before torch is loaded.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from lightning_eff.strategies._names import NAMES, StrategyName


def once_imported(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` as soon as the module ``name`` has been imported, by whomever: now, if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        call()
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder):
    """Finds nothing by itself; it lets the import of one module, once, be followed by a call."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # the others find it
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
                sys.meta_path.insert(0, self)  # it may be tried again
                raise
            self._call()

        loader.exec_module = exec_module
        return spec


class StrategyByName:
    """Stands in the registry for a strategy class that is imported when a Trainer takes it."""

    def __init__(self, name: StrategyName) -> None:
        self._of = name

    def __call__(self, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._of.module), self._of.cls)(**kwargs)


def register_strategies() -> None:
    """Make every strategy string of the package known to Lightning's Trainer."""
    from lightning.pytorch.strategies import StrategyRegistry

    for name in NAMES:
        if name.name not in StrategyRegistry:
            StrategyRegistry.register(
                name.name, StrategyByName(name), name.description, override=False, **name.arguments
            )
