"""The latest batches that Lightning asked a loader for, with the states from which each was made."""

import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_eff._core._run.stateful_loaders import own_state
from lightning_eff._core.rng import for_checkpoint

_MOST = 4  # one trained on, one in a step, and one fetched ahead or the end


@dataclass(frozen=True)
class Asked:
    """A batch that Lightning asked for.

    Attributes:
        gave: whether there was one.
        before: the global random state before it was made, as :func:`rng.look` returns it, or None if it is not known.
        own: the loader's own state before that, packed by :func:`own_before`; None if it is not kept.
        sketch: a few of its numbers, if the loader is resumed from its own state.
    """

    gave: bool
    before: dict[str, Any] | None = None
    own: bytes | None = None
    sketch: list[float] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds, to make this batch again."""
        return {"loader": unpacked(self.own), "rng": self.before and for_checkpoint(self.before), "sketch": self.sketch}


class Latest:
    """The latest of them, in the order in which Lightning asked."""

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque(maxlen=_MOST)

    def __iter__(self) -> Iterator[Asked]:
        return iter(self._asked)

    def note(self, asked: Asked) -> None:
        """Add the last one."""
        self._asked.append(asked)

    def forget_end(self) -> None:
        """Remove the last one if there was no batch."""
        if self._asked and not self._asked[-1].gave:
            self._asked.pop()

    def split(self, ahead: int, position: int, *, alone: bool) -> tuple[Asked | None, list[Asked]]:
        """Return the batch of this epoch that was trained on last, or None, and those that were only fetched.

        Args:
            ahead: how many batches of all loaders together Lightning has fetched and not yet trained on.
            position: how many batches of the epoch the loader has given.
            alone: whether the loader is the only one. Otherwise a batch of all may have none of this loader's.
        """
        asked = [one for one in self._asked if one.gave or not alone]
        fetched = [one for one in asked[len(asked) - min(ahead, len(asked)) :] if one.gave]
        fetched = fetched[len(fetched) - min(len(fetched), position) :]
        trained = [one for one in asked if one.gave]
        trained = trained[: len(trained) - len(fetched)]
        return (trained[-1] if trained and position > len(fetched) else None), fetched


def own_before(loader: Any, *, begun: bool) -> bytes:
    """Return the loader's own state as it is now, packed, because some loaders hand out objects that they change later.

    Args:
        loader: the loader.
        begun: whether the running iteration has given a batch.

    Raises:
        ValueError: if no checkpoint can hold the state.
    """
    return packed(loader, own_state(loader, begun=begun))


def packed(loader: Any, state: Any) -> bytes:
    """Return ``state`` of ``loader`` packed, as :func:`own_before` does."""
    try:
        return pickle.dumps(state)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{type(loader).__name__}: state_dict() of the training loader returns a value that cannot be pickled ({error}), so"
            " no checkpoint can hold it. Return numbers, strings, tensors, lists and dicts."
        ) from error


def unpacked(own: bytes | None) -> Any:
    """Return a copy of a packed state that nobody else changes."""
    return None if own is None else pickle.loads(own)
