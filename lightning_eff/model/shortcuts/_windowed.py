"""Modules whose attention sees a window of keys, within their own forward pass."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.mode import Replacing
from lightning_eff._core._attention.window import band, windowed_attention, within
from lightning_eff._core._resume.marks import Marked


def window_of(length: int, final: int | None, scale: float, multiple_of: int) -> int:
    """Return ``w = m floor(s W / m)``, at least m and at most W, for the final window W; None is the whole length L.

    With s = 1 it is W.
    """
    most = length if final is None else min(final, length)
    if scale >= 1.0:
        return most
    return min(most, max(multiple_of, int(scale * most) // multiple_of * multiple_of))


class Windowed(Derived, Marked):
    """A module that attends within a window.

    Attributes:
        who: the technique's name.
        final: the window W after its warm-up; None is the whole sequence.
        multiple_of: the number of tokens that windows in the warm-up are multiples of.
        scale: the fraction s of the final window in training steps, which the technique sets.
    """

    who: str
    final: int | None
    multiple_of: int
    scale: float

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Replacing(self._in_window, self.who):
            return super().forward(*args, **kwargs)

    def _in_window(self, call: Call) -> Tensor:
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        window = window_of(keys, self.final, self.scale if self.training else 1.0, self.multiple_of)
        if window >= keys:
            return call.run()
        if queries == keys:
            options: dict[str, Any] = {"enable_gqa": True} if call.groups > 1 else {}
            return windowed_attention(
                call.query,
                call.key,
                call.value,
                call.mask,
                window=window,
                is_causal=call.causal,
                dropout_p=call.dropout,
                scale=call.scale,
                **options,
            )
        if queries > keys or call.causal:
            raise ValueError(
                f"{self.who}: attention has {queries} queries and {keys} keys, so it is unclear where the queries stand. Pass"
                f" the whole sequence, or remove {self.who}."
            )
        # the queries continue a cache of keys and values
        seen = band(keys, window, call.query.device, queries)
        mask = torch.ones_like(seen) if call.mask is None else call.mask.expand(*call.mask.shape[:-2], queries, keys)
        return replace(call, mask=within(mask, seen)).run()


def windowed(plain: nn.Module, *, who: str, final: int | None, multiple_of: int) -> Windowed:
    """Return a module with ``plain``'s class, parameters and settings, and a window."""
    made = derived(Windowed, plain, who=who, final=final, multiple_of=multiple_of, scale=1.0)
    first = next(plain.parameters(), None)
    told = "whole attention" if final is None else f"attention within {final} tokens"
    made.mark(float(final or 0), told, None if first is None else first.device)
    return made
