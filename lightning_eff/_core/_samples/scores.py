"""What a run learns of the samples of its data set, one number each, alike on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Any], list[Any]]


class SampleScores:
    """A number for each sample of a data set: what was last said of it, on whichever rank.

    What a rank says is its own until :meth:`merge`, which all ranks call together.

    Attributes:
        values: shape (N,), float32, on the CPU, as of the last merge; nan where nothing was said.
    """

    def __init__(self) -> None:
        self.values = torch.empty(0)
        self._new: dict[int, float] = {}

    def update(self, indices: Sequence[int], scores: Tensor) -> None:
        """Say the scores, shape (B,), of these samples."""
        self._new.update(zip(indices, scores.tolist(), strict=True))

    def merge(self, size: int, gather: Gather) -> Tensor:
        """``values`` of ``size`` samples, with what all ranks said since; of two ranks' words the later rank's counts."""
        if len(self.values) != size:
            self.values = torch.full((size,), torch.nan)
        for new in gather(self._new):
            if new:
                self.values[torch.tensor(list(new))] = torch.tensor(list(new.values()))
        self._new = {}
        return self.values

    def state_dict(self, gather: Gather) -> dict[str, Any]:
        """For a checkpoint; collective."""
        return {"values": self.values.clone(), "new": gather(self._new)}

    def load_state_dict(self, state: dict[str, Any], rank: int) -> None:
        """Take over what :meth:`state_dict` gave, on the rank ``rank``."""
        self.values = state["values"].clone()
        self._new = dict(state["new"][rank]) if rank < len(state["new"]) else {}
