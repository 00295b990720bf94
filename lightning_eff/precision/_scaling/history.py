"""Delayed scaling: scales from the largest amax of the last steps, as in NVIDIA's Transformer Engine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels.fp8_cast import Peak

ROLES = ("x", "weight", "gradient")
_NONE = -1.0  # stands for "not known"


class AmaxHistory:
    """The amax of each layer's input, weight and output gradient over the last optimizer steps.

    Within a step, the largest amax of all micro-batches counts. :meth:`advance` ends a step and shares the amax over ranks, so
    that all ranks have the same scales. A layer that did not run in a step keeps its history. A non-finite amax is skipped.
    Nothing here synchronizes with the device. The kernel that casts a gradient also records the three amax of its layer
    (:meth:`peak`), so a step launches nothing for the history except in :meth:`advance`.

    Args:
        paths: the paths of the layers.
        length: the number of remembered steps, >= 1.
        device: the device of the layers.

    Attributes:
        amax: float32, (3 x layers, length), newest first, -1 where unknown.
    """

    def __init__(self, paths: Sequence[str], length: int, device: torch.device | None = None) -> None:
        self.paths = tuple(paths)
        self.length = length
        self.amax = torch.full((len(ROLES) * len(self.paths), length), _NONE, device=device)
        # written in place, so that their views stay valid
        self._now = torch.full_like(self.amax[:, 0], _NONE)
        self._peak = self._now.clone()
        self._scratch = torch.zeros(len(self._now), 2, dtype=torch.int32, device=device)
        self._rows = {path: len(ROLES) * i for i, path in enumerate(self.paths)}
        self._views = [Peak(value, scratch=scratch) for value, scratch in zip(self._peak, self._scratch, strict=True)]
        self._records = list(self._now.split(len(ROLES)))
        self._known = [False] * len(self._now)
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def row(self, path: str, role: str) -> int:
        """Return the row of a layer's tensor in :attr:`amax`."""
        return self._rows[path] + ROLES.index(role)

    def peak(self, path: str, role: str, others: Sequence[Tensor] | None = None) -> Peak:
        """Return the amax to scale by, for :func:`.fp8_cast.cast`.

        Args:
            path: the path of the layer.
            role: which tensor of the layer is cast.
            others: the amax of the layer's input and weight, float32, (), to record together with that of its gradient; None
                records nothing.
        """
        row = self.row(path, role)
        if self._asked is not None and self._asked[1].query():
            self._known, self._asked = self._asked[0].tolist(), None
        peak = self._views[row]._replace(known=self._known[row])
        if others is None:
            return peak
        return peak._replace(record=self._records[row // len(ROLES)], others=tuple(others))

    def record(self, row: int, amax: Tensor) -> None:
        """Record the amax of this step's tensor, float32, ()."""
        now = self._now[row]
        torch.maximum(now, torch.where(amax.isfinite(), amax, _NONE), out=now)

    @torch.no_grad()
    def advance(self) -> None:
        """End an optimizer step; a collective operation with several processes."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._now, torch.distributed.ReduceOp.MAX)
        ran = (self._now >= 0)[:, None]
        self.amax = torch.where(ran, torch.cat([self._now[:, None], self.amax[:, :-1]], 1), self.amax)
        self._now.fill_(_NONE)
        self._peak.copy_(self.amax.amax(1))
        self._ask()

    def _ask(self) -> None:
        """Ask the device which peaks are known, without waiting for the answer; a known peak stays known."""
        if self._asked is not None or all(self._known):
            return
        known = self._peak >= 0
        if known.is_cuda:
            answer = torch.empty(known.shape, dtype=torch.bool, pin_memory=True).copy_(known, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._asked = answer, event
        else:
            self._known = known.tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"maps": list(self.paths), "amax": self.amax.cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the history of the layers that still exist; if it is longer, its newest part."""
        length = min(self.length, state["amax"].shape[1])
        amax = torch.full(self.amax.shape, _NONE)
        for i, path in enumerate(state["maps"]):
            if path in self._rows:
                old = state["amax"][len(ROLES) * i : len(ROLES) * (i + 1), :length]
                amax[self._rows[path] : self._rows[path] + len(ROLES), :length] = old
        self.amax = amax.to(self.amax.device)
        self._now.fill_(_NONE)
        self._peak.copy_(self.amax.amax(1))
        self._known, self._asked = (amax.amax(1) >= 0).tolist(), None
