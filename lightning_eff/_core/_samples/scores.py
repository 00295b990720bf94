"""Keep one number per sample of the data set that the run learns, the same on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Any], list[Any]]


class SampleScores:
    """The latest number for each sample of a data set, from any rank.

    Updates stay on their rank until :meth:`merge`, which all ranks call together.

    Attributes:
        values: the numbers as of the last merge, shape (N,), float32, on the CPU. NaN for samples without one.
    """

    def __init__(self) -> None:
        self.values = torch.empty(0)
        self._new: dict[int, float] = {}

    def update(self, indices: Sequence[int], scores: Tensor) -> None:
        """Record the scores, shape (B,), of these samples."""
        self._new.update(zip(indices, scores.tolist(), strict=True))

    def merge(self, size: int, gather: Gather) -> Tensor:
        """Merge the updates of all ranks into ``values`` of ``size`` samples. The higher rank wins."""
        if len(self.values) != size:
            self.values = torch.full((size,), torch.nan)
        for new in gather(self._new):
            if new:
                self.values[torch.tensor(list(new))] = torch.tensor(list(new.values()))
        self._new = {}
        return self.values

    def state_dict(self, gather: Gather) -> dict[str, Any]:
        """Return the state for a checkpoint. All ranks must call it."""
        return {"values": self.values.clone(), "new": gather(self._new)}

    def load_state_dict(self, state: dict[str, Any], rank: int) -> None:
        """Restore a state on the rank ``rank``."""
        self.values = state["values"].clone()
        self._new = dict(state["new"][rank]) if rank < len(state["new"]) else {}
