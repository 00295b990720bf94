"""Suspend torch function modes while compiled code is entered."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import overrides


@contextmanager
def without_listeners() -> Iterator[None]:
    """Suspend the modes with ``apart_from_compiled``, which observe nothing here and would be compiled too."""
    modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # innermost first
    kept = [mode for mode in modes if not getattr(mode, "apart_from_compiled", False)]
    for mode in reversed(kept):
        overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            overrides._pop_mode()
        for mode in reversed(modes):
            overrides._push_mode(mode)
