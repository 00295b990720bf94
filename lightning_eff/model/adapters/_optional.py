"""Libraries of the extras ``peft`` and ``bitsandbytes``, imported when they are used."""

import importlib
import importlib.util
import sys
from typing import Any


def imported(name: str, *, extra: str, who: str) -> Any:
    """The module ``name``.

    Raises:
        ImportError: if it is not installed, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{who} needs {extra}, which cannot be imported ({error}). Install it: pip install 'lightning-eff[{extra}]'."
        ) from error


def needed(name: str, *, extra: str, who: str) -> None:
    """Raise ``ImportError`` as :func:`imported` does, without the import time if it is installed."""
    there = sys.modules[name] is not None if name in sys.modules else importlib.util.find_spec(name) is not None
    if not there:
        imported(name, extra=extra, who=who)
