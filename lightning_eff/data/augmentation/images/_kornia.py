"""kornia, of the extra ``augmentation``, imported when it is used."""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

from lightning_eff._core._lightning.extras import missing


def needed(who: str) -> None:
    """Raise ``ImportError`` if kornia is not installed, without importing it, which takes a second."""
    there = sys.modules["kornia"] is not None if "kornia" in sys.modules else importlib.util.find_spec("kornia")
    if not there:
        raise ImportError(missing(who, "kornia", "augmentation"))


@cache
def enhance() -> Any:
    """Return ``kornia.enhance``: colour operations on images in [0, 1]."""
    return _imported("kornia.enhance")


def _imported(name: str) -> ModuleType:
    return importlib.import_module(name)
