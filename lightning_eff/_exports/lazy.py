"""Delay the work of ``import lightning_eff``: import classes when first used, and add strategy strings after Lightning.

This module imports nothing heavy, because ``lightning-eff plan`` checks its arguments before it loads torch.
"""

import importlib
import os
from functools import wraps
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_eff._core._lightning.imports import once_imported as once_imported
from lightning_eff.strategies._names import NAMES, StrategyName, meant, sized, wrong


class StrategyByName:
    """A registry entry that imports its strategy class when a Trainer uses it."""

    def __init__(self, name: StrategyName) -> None:
        self._of = name

    def __call__(self, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._of.module), self._of.cls)(**kwargs)


class _Strings(list[str]):
    """The strategy strings, in which a Trainer looks before it asks the registry.

    They include strings of any size. They also include misspelt strings of this package, for which the registry then raises
    an error with the right spelling.
    """

    @override
    def __contains__(self, name: Any) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and meant(name, self) is not None)


def register_strategies(package: str) -> None:
    """Register this package's strategy strings with Lightning's ``package``, which is one of its two names."""
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    get, available = registry.get, registry.available_strategies

    def found(name: str, default: Any = None) -> Any:
        if name not in registry and (one := sized(name)) is not None:
            return StrategyByName(one)(**one.arguments)
        if name not in registry and default is None and (right := meant(name, available())) is not None:
            raise ValueError(wrong(name, right))
        return get(name, default)

    registry.get, registry.available_strategies = found, lambda: _Strings(available())
    for name in NAMES:
        if name.name not in registry:
            registry.register(name.name, StrategyByName(name), name.description, override=False, **name.arguments)


def explain_folders(fabric: str) -> None:
    """Let Lightning's checkpoint reader in ``fabric`` explain what to do with a sharded checkpoint, which is a folder.

    Other strategies would only say that the path is a directory.
    """
    reader = importlib.import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO
    load = reader.load_checkpoint

    @wraps(load)
    def load_checkpoint(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(path) if isinstance(path, str | os.PathLike) else Path()
        if (folder / "meta.pt").is_file() and (folder / ".metadata").is_file():
            raise IsADirectoryError(
                f"Trainer(ckpt_path={str(path)!r}): this is a folder of pieces of a model, but this Trainer's strategy reads"
                " files. Resume with the strategy that wrote it, such as strategy='hybrid', or convert it to a file of weights:"
                f" python -m {fabric}.utilities.consolidate_checkpoint {path}"
            )
        return load(self, path, *args, **kwargs)

    reader.load_checkpoint = load_checkpoint
