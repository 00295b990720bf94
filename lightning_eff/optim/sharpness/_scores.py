"""A store of what a network said of each sample in its last epochs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int32).min  # the epoch of what has no scores yet: before all that any epoch looks back to
CHUNK = 2**22  # entries that ranks exchange at a time


def store_bytes(num_samples: int, num_rows: int, num_classes: int, lag: int, itemsize: int) -> int:
    """What a :class:`ScoreStore` takes: ``lag`` past epochs, the running one, and of each row the epoch it is of."""
    rows = num_samples * num_rows
    return (lag + 1) * rows * num_classes * itemsize + lag * rows * 4


def latest(places: Tensor) -> Tensor:
    """The indices of those entries of ``places``, long (M,), that no equal one comes after; by ascending place."""
    order = places.sort(stable=True)
    last = torch.ones_like(order.values, dtype=torch.bool)
    last[:-1] = order.values[1:] != order.values[:-1]
    return order.indices[last]


class ScoreStore:
    """The scores of N samples, R rows of C each, as they were in each of the last ``lag`` epochs.

    An epoch's scores are put by as they come, on the rank that they come on, and all ranks take up those of all of them as the
    epoch is closed: from then on their stores are alike, so a sample finds its scores on whichever rank it comes next. Where
    one comes more than once in an epoch, one of its scores is kept, the same on all ranks.

    Args:
        num_samples: N.
        num_rows: R, rows of scores of a sample; 1 where it has one label.
        num_classes: C.
        lag: epochs, >= 1.
        dtype: of the scores.
        device: where they are kept.
    """

    def __init__(
        self, num_samples: int, num_rows: int, num_classes: int, *, lag: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_samples, self.num_rows, self.num_classes, self.lag = num_samples, num_rows, num_classes, lag
        rows = num_samples * num_rows
        self._scores = torch.zeros(lag, rows, num_classes, dtype=dtype, device=device)
        self._epochs = torch.full((lag, rows), NEVER, dtype=torch.int32, device=device)
        self._fresh: list[tuple[Tensor, Tensor]] = []  # (places, scores) of the running epoch, by step

    def places(self, samples: Tensor, rows: Tensor) -> Tensor:
        """Where these rows of these samples are; -1 for rows that the store has no room for."""
        return torch.where(rows < self.num_rows, samples * self.num_rows + rows, -1)

    def read(self, places: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """The scores (M, C) that ``places``, shape (M,), had ``lag`` epochs before ``epoch``, and for which they are known."""
        slot, at = epoch % self.lag, places.clamp(min=0).to(self._scores.device)
        known = (self._epochs[slot, at] == epoch - self.lag) & (places >= 0).to(at.device)
        return self._scores[slot, at], known

    def put_by(self, places: Tensor, scores: Tensor) -> None:
        """Keep scores (M, C) of the running epoch; those at places of -1 are let go as it is over."""
        device, dtype = self._scores.device, self._scores.dtype
        self._fresh.append((places.to(device), scores.to(device, dtype)))

    def close(self, epoch: int, gather: Callable[[Any], list[Any]]) -> None:
        """Take up what all ranks have put by in ``epoch``, which is over.

        Args:
            epoch: its number.
            gather: gives a value of every rank, in rank order, on every rank; all of them call it equally often.
        """
        places, scores = self._joined()
        self._fresh = []
        size = max(1, CHUNK // max(self.num_classes, 1))
        for start in range(0, max(gather(len(places))), size):
            part = slice(start, start + size)
            for at, values in gather((places[part], scores[part])):
                keep = latest(at)
                self._scores[epoch % self.lag, at[keep].to(self._scores.device)] = values[keep].to(self._scores.device)
                self._epochs[epoch % self.lag, at.to(self._scores.device)] = epoch

    def _joined(self) -> tuple[Tensor, Tensor]:
        """What is put by and has a place, on the CPU."""
        if not self._fresh:
            return torch.empty(0, dtype=torch.long), torch.empty(0, self.num_classes, dtype=self._scores.dtype)
        places, scores = (torch.cat(parts).cpu() for parts in zip(*self._fresh, strict=True))
        return places[places >= 0], scores[places >= 0]

    def to(self, device: torch.device) -> None:
        """Keep everything there."""
        self._scores, self._epochs = self._scores.to(device), self._epochs.to(device)
        self._fresh = [(places.to(device), scores.to(device)) for places, scores in self._fresh]

    # -- saved with the run

    def state_dict(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        return {
            "shape": [self.num_samples, self.num_rows, self.num_classes, self.lag],
            "scores": self._scores,
            "epochs": self._epochs,
            "fresh": [list(one) for one in gather(self._joined())],
        }

    @classmethod
    def load(cls, state: dict[str, Any], *, rank: int, world_size: int) -> "ScoreStore":
        """The store of a checkpoint, on the CPU. Ranks of another number share out what was put by: the first has it all."""
        num_samples, num_rows, num_classes, lag = state["shape"]
        dtype = state["scores"].dtype
        store = cls(num_samples, num_rows, num_classes, lag=lag, dtype=dtype, device=torch.device("cpu"))
        store._scores, store._epochs = state["scores"].cpu(), state["epochs"].cpu()
        fresh = [(places, scores) for places, scores in state["fresh"]]
        if len(fresh) == world_size:
            store._fresh = [fresh[rank]]
        elif rank == 0:
            store._fresh = fresh
        return store
