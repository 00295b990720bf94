"""A store of the network's scores of each sample in the last epochs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int32).min  # the epoch of entries without scores
CHUNK = 2**22  # entries that ranks exchange at a time


def store_bytes(num_samples: int, num_rows: int, num_classes: int, lag: int, itemsize: int) -> int:
    """The size of a :class:`ScoreStore`: ``lag`` past epochs, the current one, and the epoch of each row."""
    rows = num_samples * num_rows
    return (lag + 1) * rows * num_classes * itemsize + lag * rows * 4


def latest(places: Tensor) -> Tensor:
    """The index of the last entry of each value in ``places``, long (M,), by ascending value."""
    order = places.sort(stable=True)
    last = torch.ones_like(order.values, dtype=torch.bool)
    last[:-1] = order.values[1:] != order.values[:-1]
    return order.indices[last]


class ScoreStore:
    """The scores of N samples, R rows of C each, in each of the last ``lag`` epochs.

    An epoch's scores are collected on the rank that computes them. When the epoch is closed, all ranks take over the scores
    of all ranks: from then on their stores are equal, so a sample finds its scores on any rank. If a sample comes more than
    once in an epoch, one of its scores is kept, the same on all ranks.

    Args:
        num_samples: N.
        num_rows: R, the rows of scores per sample; 1 if it has one label.
        num_classes: C.
        lag: the number of epochs, >= 1.
        dtype: the dtype of the scores.
        device: where they are kept.
    """

    def __init__(
        self, num_samples: int, num_rows: int, num_classes: int, *, lag: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_samples, self.num_rows, self.num_classes, self.lag = num_samples, num_rows, num_classes, lag
        rows = num_samples * num_rows
        self._scores = torch.zeros(lag, rows, num_classes, dtype=dtype, device=device)
        self._epochs = torch.full((lag, rows), NEVER, dtype=torch.int32, device=device)
        self._fresh: list[tuple[Tensor, Tensor]] = []  # (places, scores) of the current epoch, by step

    def places(self, samples: Tensor, rows: Tensor) -> Tensor:
        """The places of these rows of these samples; -1 for rows beyond the store's R."""
        return torch.where(rows < self.num_rows, samples * self.num_rows + rows, -1)

    def read(self, places: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """The scores (M, C) of ``places`` (M,) from ``lag`` epochs before ``epoch``, and a mask (M,) of the known ones."""
        slot, at = epoch % self.lag, places.clamp(min=0).to(self._scores.device)
        known = (self._epochs[slot, at] == epoch - self.lag) & (places >= 0).to(at.device)
        return self._scores[slot, at], known

    def put_by(self, places: Tensor, scores: Tensor) -> None:
        """Keep scores (M, C) of the current epoch; those at place -1 are dropped at its end."""
        device, dtype = self._scores.device, self._scores.dtype
        self._fresh.append((places.to(device), scores.to(device, dtype)))

    def close(self, epoch: int, gather: Callable[[Any], list[Any]]) -> None:
        """Take over the scores that all ranks collected in ``epoch``, which is over.

        Args:
            epoch: its number.
            gather: returns the values of all ranks, in rank order, on every rank. Every rank calls it equally often.
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
        """The collected scores that have a place, on the CPU."""
        if not self._fresh:
            return torch.empty(0, dtype=torch.long), torch.empty(0, self.num_classes, dtype=self._scores.dtype)
        places, scores = (torch.cat(parts).cpu() for parts in zip(*self._fresh, strict=True))
        return places[places >= 0], scores[places >= 0]

    def to(self, device: torch.device) -> None:
        """Move everything to ``device``."""
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
        """The store of a checkpoint, on the CPU. With another number of ranks, the first takes all collected scores."""
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
