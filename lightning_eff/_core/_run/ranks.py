"""What is looked at with the first batch, on all ranks at once."""

from collections.abc import Callable
from typing import TypeVar

from lightning_eff._core.session import Session

T = TypeVar("T")


def on_all_ranks(session: Session, fn: Callable[[], T]) -> T:
    """``fn()``; where it raises on one rank, all ranks raise, so that none waits for another.

    Raises:
        ValueError: if it raised on another rank, with what was said there; what it raised on this one comes first.
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
