"""Read the attention of a transformer's first token to all others while it is computed."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call, read
from lightning_eff._core._attention.mode import Replacing


def grid_of(patches: int, side: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of a grid of square patches on images of ``side`` (H, W), or None if there is none."""
    height, width = side
    rows = round((max(patches, 0) * height / width) ** 0.5)
    if rows < 1 or patches % rows or rows * width != (patches // rows) * height:
        return None
    return rows, patches // rows


class Reading(Replacing):
    """A context that records the last attention of the first token. Attention calls compute the same as before."""

    def __init__(self, who: str) -> None:
        super().__init__(Call.run, who)
        self._last: Call | Tensor | None = None

    @override
    def replace(self, *args: Any, **kwargs: Any) -> Tensor:
        call, _ = read(args, kwargs)
        if not self.rerunning:
            self.calls += 1
            row = None if call.mask is None else call.mask[..., :1, :].detach()
            # these are views: nothing is computed before weights() is called
            self._last = replace(call, query=call.query[:, :, :1].detach(), key=call.key.detach(), mask=row)
        return F.scaled_dot_product_attention(*args, **kwargs)

    @override
    def softmaxed(self, weights: Tensor) -> Tensor:
        self._last = weights[:, :, :1].detach()
        return weights

    def weights(self) -> Tensor | None:
        """Return the first token's attention in the last call, averaged over heads: (B, S), float32. None before any call."""
        if self._last is None:
            return None
        if isinstance(self._last, Tensor):
            return self._last[:, :, 0].float().mean(dim=1)
        call = replace(self._last, query=self._last.query.float(), key=self._last.key.float(), causal=False)
        if call.mask is not None and call.mask.dtype != torch.bool:
            call = replace(call, mask=call.mask.float())
        with torch.autocast(call.query.device.type, enabled=False):
            return call.scores().softmax(dim=-1)[:, :, 0].mean(dim=1)
