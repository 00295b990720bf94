"""Delayed scaling: a scale from the largest amax of the last steps, as in NVIDIA's Transformer Engine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROLES = ("x", "weight", "gradient")
_NONE = -1.0  # stands for "not known"


class AmaxHistory:
    """The amax of each map's input, weight and output gradient over the last optimizer steps.

    Within a step the largest amax of all micro-batches counts. :meth:`advance` ends a step, and shares the amax over all
    ranks, so that ranks have the same scales. What did not run in a step keeps its history. An amax that is not finite
    is left out. Nothing here waits for the device.

    Args:
        paths: the maps.
        length: steps that are remembered, >= 1.
        device: where the maps run.

    Attributes:
        amax: float32, (3 x maps, length): newest first, -1 where not known.
    """

    def __init__(self, paths: Sequence[str], length: int, device: torch.device | None = None) -> None:
        self.paths = tuple(paths)
        self.length = length
        self.amax = torch.full((len(ROLES) * len(self.paths), length), _NONE, device=device)
        self._now = torch.full_like(self.amax[:, 0], _NONE)
        self._peak = self._now.clone()
        self._rows = {path: len(ROLES) * i for i, path in enumerate(self.paths)}

    def row(self, path: str, role: str) -> int:
        """Where a map's tensor stands in :attr:`amax`."""
        return self._rows[path] + ROLES.index(role)

    def reference(self, row: int, amax: Tensor) -> Tensor:
        """The amax to scale by, float32, (): the largest one of the history; ``amax`` itself while there is none."""
        peak = self._peak[row]
        return torch.where(peak < 0, amax, peak)

    def record(self, row: int, amax: Tensor) -> None:
        """Note the amax of this step's tensor, float32, ()."""
        now = self._now[row]
        torch.maximum(now, torch.where(amax.isfinite(), amax, _NONE), out=now)

    @torch.no_grad()
    def advance(self) -> None:
        """An optimizer step has ended; collective where several processes train."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._now, torch.distributed.ReduceOp.MAX)
        ran = (self._now >= 0)[:, None]
        self.amax = torch.where(ran, torch.cat([self._now[:, None], self.amax[:, :-1]], 1), self.amax)
        self._now = torch.full_like(self._now, _NONE)
        self._peak = self.amax.amax(1)

    def state_dict(self) -> dict[str, Any]:
        return {"maps": list(self.paths), "amax": self.amax.cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the history of the maps that are still there; of a longer one the newest part."""
        length = min(self.length, state["amax"].shape[1])
        amax = torch.full(self.amax.shape, _NONE)
        for i, path in enumerate(state["maps"]):
            if path in self._rows:
                old = state["amax"][len(ROLES) * i : len(ROLES) * (i + 1), :length]
                amax[self._rows[path] : self._rows[path] + len(ROLES), :length] = old
        self.amax = amax.to(self.amax.device)
        self._now = torch.full_like(self._now, _NONE)
        self._peak = self.amax.amax(1)
