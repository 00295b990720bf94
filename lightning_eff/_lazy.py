"""What ``import lightning_eff`` puts off: classes until they are asked for, strategy strings until Lightning is there.

Nothing heavy is imported here: ``lightning-eff plan`` looks at its arguments before torch is loaded.
"""

import importlib
from typing import Any

from lightning_eff._core._lightning.imports import once_imported as once_imported
from lightning_eff.strategies._names import NAMES, StrategyName


class StrategyByName:
    """Stands in the registry for a strategy class that is imported when a Trainer takes it."""

    def __init__(self, name: StrategyName) -> None:
        self._of = name

    def __call__(self, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._of.module), self._of.cls)(**kwargs)


def register_strategies(package: str) -> None:
    """Make every strategy string of the package known to the Trainer of ``package``, one of Lightning's two names."""
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    for name in NAMES:
        if name.name not in registry:
            registry.register(name.name, StrategyByName(name), name.description, override=False, **name.arguments)
