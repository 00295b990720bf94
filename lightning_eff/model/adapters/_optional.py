"""Libraries of the extras ``peft`` and ``bitsandbytes``, imported when they are used."""

import importlib
from typing import Any


def imported(name: str, *, extra: str, who: str) -> Any:
    """The module ``name``.

    Raises:
        ImportError: where it is not installed, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{who} needs {extra}, which cannot be imported ({error}). Install it: pip install 'lightning-eff[{extra}]'."
        ) from error
