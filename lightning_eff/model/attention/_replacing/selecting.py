"""Attention to chosen keys, whose weights are normalised to sum to one again."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.technique import OUTSIDE, ReplacedAttention

#: The control of techniques that choose keys.
SLOWER = Control(
    "the baseline for as many seconds with its learning rate decayed to zero, since a step costs more with the technique"
)


def with_best(keep: Tensor, estimate: Tensor, seen: Tensor | None) -> Tensor:
    """Return ``keep``, with the key of the highest estimate added for each query that keeps no visible key.

    Args:
        keep: (B, H, L, S), bool.
        estimate: how much each key matters, of the same shape.
        seen: which keys may be seen, or None for all; broadcasts to the same shape.
    """
    if seen is not None:
        keep = keep & seen
        estimate = estimate.masked_fill(~seen, -torch.inf)
    best = torch.zeros_like(keep).scatter_(-1, estimate.argmax(-1, keepdim=True), True)
    best = best if seen is None else best & seen
    return keep | (best & ~keep.any(-1, keepdim=True))


class SelectedKeys(ReplacedAttention):
    """Attends exactly to the keys that :meth:`keep` chooses, among those that earlier techniques left.

    The choice has no gradient. It covers all pairs, and so does the attention that follows: this saves nothing, except
    on hardware that can skip single pairs.
    """

    conflicts: ClassVar[Mapping[str, str]] = OUTSIDE
    checkpointed = ("_kept", "_chosen")
    control = SLOWER
    constraints = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; no faster on a CPU or GPU"
    )
    saves = "attention products on hardware that skips single pairs; costs time elsewhere"

    _kept: Tensor | float = 0.0  # fractions of pairs, summed over calls of the last step
    _chosen = 0

    @abstractmethod
    def keep(self, call: Call) -> Tensor:
        """Return which keys each query keeps, (B, H, L, S), bool; a query must keep at least one key that it may see."""

    @override
    def begin(self) -> None:
        self._kept, self._chosen = 0.0, 0

    @override
    def attend(self, call: Call) -> Tensor:
        with torch.no_grad():
            narrowed = call.of_keys(self.keep(call))
            if self._modes and not self._modes[0].rerunning:
                seen, left = call.may_see(), narrowed.may_see()
                assert left is not None
                all_pairs = call.query.shape[0] * call.query.shape[1] * call.query.shape[2] * call.key.shape[2]
                whole = all_pairs if seen is None else seen.expand(left.shape).sum()
                self._kept = self._kept + left.sum() / whole
                self._chosen += 1
        if call.mask is not None and call.mask.requires_grad:  # only the remaining pairs give it a gradient
            narrowed = call.of_keys(narrowed.may_see())  # pyright: ignore[reportArgumentType]
        return narrowed.run()

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "kept": self._kept / max(self._chosen, 1)}

    @override
    def summary(self) -> str:
        if not self._chosen:
            return "no step taken"
        return f"kept {float(self.report()['kept']):.0%} of the pairs of {self._calls} calls of attention per step"
