"""The attention that a transformer's first token pays to all others, read while it is computed."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call, read
from lightning_eff._core._attention.mode import Replacing


def grid_of(patches: int, side: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of so many square patches on images of ``side`` (H, W); None where there is no such grid."""
    height, width = side
    rows = round((max(patches, 0) * height / width) ** 0.5)
    if rows < 1 or patches % rows or rows * width != (patches // rows) * height:
        return None
    return rows, patches // rows


class Reading(Replacing):
    """While it is entered, notes the last attention of a class token, and leaves all calls as they are."""

    def __init__(self, who: str) -> None:
        super().__init__(Call.run, who)
        self._last: Call | Tensor | None = None

    @override
    def replace(self, *args: Any, **kwargs: Any) -> Tensor:
        call, _ = read(args, kwargs)
        if not self.rerunning:
            self.calls += 1
            row = None if call.mask is None else call.mask[..., :1, :].detach()
            # views: nothing is computed until the weights are asked for
            self._last = replace(call, query=call.query[:, :, :1].detach(), key=call.key.detach(), mask=row)
        return F.scaled_dot_product_attention(*args, **kwargs)

    @override
    def softmaxed(self, weights: Tensor) -> Tensor:
        self._last = weights[:, :, :1].detach()
        return weights

    def weights(self) -> Tensor | None:
        """The first token's attention in the last call so far, the mean over heads: (B, S), float32; None without any."""
        if self._last is None:
            return None
        if isinstance(self._last, Tensor):
            return self._last[:, :, 0].float().mean(dim=1)
        call = replace(self._last, query=self._last.query.float(), key=self._last.key.float(), causal=False)
        if call.mask is not None and call.mask.dtype != torch.bool:
            call = replace(call, mask=call.mask.float())
        with torch.autocast(call.query.device.type, enabled=False):
            return call.scores().softmax(dim=-1)[:, :, 0].mean(dim=1)
