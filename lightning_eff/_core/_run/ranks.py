"""Checks of the first batch, on all ranks together."""

from collections.abc import Callable
from typing import TypeVar

from lightning_eff._core.session import Session

T = TypeVar("T")


def on_all_ranks(session: Session, fn: Callable[[], T]) -> T:
    """Return ``fn()``; if it raises on one rank, all ranks raise, so that none waits for another.

    Raises:
        ValueError: if it raised on another rank, with that rank's message. An error on this rank is raised first.
    """
    found: list[T] = []
    error = None
    try:
        found.append(fn())
    except Exception as raised:
        error = raised
    messages = session.replicas.everyone(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"On rank {rank}: {message}")
    return found[0]
