"""What ``import lightning_eff`` puts off: classes until they are asked for, strategy strings until Lightning is there.

Nothing heavy is imported here: ``lightning-eff plan`` looks at its arguments before torch is loaded.
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
    """Stands in the registry for a strategy class that is imported when a Trainer takes it."""

    def __init__(self, name: StrategyName) -> None:
        self._of = name

    def __call__(self, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._of.module), self._of.cls)(**kwargs)


class _Strings(list[str]):
    """Strategy strings, which a Trainer looks a string up in before it asks the registry for the strategy.

    Those of any sizes are in it. So are misspelt ones of this package, of which the registry then says what is right.
    """

    @override
    def __contains__(self, name: Any) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and meant(name, self) is not None)


def register_strategies(package: str) -> None:
    """Make every strategy string of the package known to the Trainer of ``package``, one of Lightning's two names."""
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
    """Let Lightning's reader of checkpoint files, in ``fabric``, say what to do with a folder of pieces.

    A Trainer without a strategy that writes such folders would say that the path is a directory.
    """
    reader = importlib.import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO
    load = reader.load_checkpoint

    @wraps(load)
    def load_checkpoint(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(path) if isinstance(path, str | os.PathLike) else Path()
        if (folder / "meta.pt").is_file() and (folder / ".metadata").is_file():
            raise IsADirectoryError(
                f"Trainer(ckpt_path={str(path)!r}): this is a folder of pieces of a model, and this Trainer's strategy reads"
                " files. Resume with the strategy that wrote it, such as strategy='hybrid', or make a file with the model's"
                f" weights of it: python -m {fabric}.utilities.consolidate_checkpoint {path}"
            )
        return load(self, path, *args, **kwargs)

    reader.load_checkpoint = load_checkpoint
