"""Lets modules compute in another way for a while, with their own parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_eff._core._stack.partial_views import Worn, put_on, take_off


@contextmanager
def worn(kind: type[Worn], modules: Iterable[nn.Module], values: Iterable[Any]) -> Iterator[None]:
    """Let each module run the ``forward`` of ``kind`` until the context ends.

    Args:
        kind: the class with the other ``forward``, in which ``worn_by`` gives the module's value.
        modules: the modules; one that already computes in another way is skipped.
        values: one for each module.
    """
    changed = [(m, value) for m, value in zip(modules, values, strict=True) if not isinstance(m, Worn)]
    for m, value in changed:
        put_on(m, kind, value)
    try:
        yield
    finally:
        for m, _ in changed:
            take_off(m)
