"""Efficient-training techniques for PyTorch Lightning, stacked onto an unchanged LightningModule."""

import functools as _functools
import sys as _sys
import typing as _typing

from lightning_eff._exports import lazy as _lazy
from lightning_eff._exports import public as _public
from lightning_eff._exports import source_tree as _source_tree  # noqa: F401 before all that imports lightning_eff.kernels

__all__ = sorted(_public.HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - type checkers read __init__.pyi


def __getattr__(name: str) -> _typing.Any:
    """Import what is asked for: a training run needs few of the techniques, and the command line none to be told of a slip."""
    if name == "__version__":
        found = _public.version()
    else:
        _public.check_imported(name, _sys._getframe(1))
        found = _public.found(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_public.HOMES, *_public.FOLDERS})


def _import_techniques() -> None:
    """A LightningCLI takes the classes that are imported by their names alone. The bench and the search stay out."""
    for name, home in _public.HOMES.items():
        if not home.startswith(("lightning_eff.bench", "lightning_eff.tune")):
            __getattr__(name)


for _package in ("lightning.pytorch", "pytorch_lightning"):
    _lazy.once_imported(f"{_package}.strategies", _functools.partial(_lazy.register_strategies, _package))
    _lazy.once_imported(f"{_package}.cli", _import_techniques)
for _package in ("lightning.fabric", "lightning_fabric"):
    _lazy.once_imported(f"{_package}.plugins.io.torch_io", _functools.partial(_lazy.explain_folders, _package))
