"""Track random numbers that an iteration draws between batches, while training draws from the same state."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_eff._core import rng

_MOST = 4096  # states per iteration in a checkpoint, 5 kB each


class Draws:
    """Keeps the random state before each fetch that draws from another state than the previous fetch left.

    An iteration repeats exactly if those fetches begin from these states, which include the draws of training in between.
    Nothing is kept if fetches draw nothing, or if nothing else draws.

    Args:
        watch: False if the iteration is known to draw only when it begins.
    """

    def __init__(self, *, watch: bool = True) -> None:
        self.watch = watch
        self.whole = True
        self._states: dict[int, dict[str, Any]] = {}
        self._replays: dict[int, dict[str, Any]] = {}
        self._after: dict[str, Any] = {}

    def begin(self, state: dict[str, Any], replays: list[Any] | None = None) -> None:
        """Begin an iteration from the random state ``state``, with the fetches to repeat in ``replays``."""
        self._replays = dict(replays or [])
        self._states, self._after, self.whole = dict(self._replays), state, True

    def fetch(self, position: int, fetch: Callable[[], Any]) -> Any:
        """Run ``fetch()`` at ``position`` and return its result."""
        if position in self._replays:
            rng.restore(self._replays[position])
        if not self.watch:
            return fetch()
        before = rng.capture()
        found = fetch()
        after = rng.capture()
        if not same_state(before, after):
            if position not in self._states and not same_state(before, self._after):
                self._keep(position, before)
            self._after = after
        return found

    def _keep(self, position: int, state: dict[str, Any]) -> None:
        if len(self._states) >= _MOST:
            self.whole = False
        else:
            self._states[position] = state

    def saved(self, before: int | None = None) -> list[Any]:
        """Return the states of the fetches, or of those before a position, for a checkpoint."""
        return [[at, state] for at, state in sorted(self._states.items()) if before is None or at < before]


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two random states are equal."""
    return torch.equal(a["torch"], b["torch"]) and _alike(a["python"], b["python"]) and _alike(a["numpy"], b["numpy"])


def _alike(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))
