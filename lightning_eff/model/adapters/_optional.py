"""Libraries of the extras ``peft`` and ``bitsandbytes``, imported when they are used."""

import importlib
import importlib.util
import sys
from typing import Any

from lightning_eff._core._lightning.extras import install


def imported(name: str, *, extra: str, who: str) -> Any:
    """The module ``name``.

    Raises:
        ImportError: if it is not installed, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{who}: cannot import {extra} ({error}). In a clone of lightning_eff, run: {install(extra)}"
        ) from error


def needed(name: str, *, extra: str, who: str) -> None:
    """Raise ``ImportError`` as :func:`imported` does, without the import time if it is installed."""
    there = sys.modules[name] is not None if name in sys.modules else importlib.util.find_spec(name) is not None
    if not there:
        imported(name, extra=extra, who=who)
