"""The mask, the dropout and the dtype of attention calls, for methods without a weight for each pair of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_eff._core._attention.calls import Call, CannotReplace, keys_alone


def visible_keys(call: Call, who: str) -> tuple[Tensor | None, bool]:
    """Return which keys may be seen, (B or 1, H or 1, S), or None for all, and whether attention is causal.

    Raises:
        CannotReplace: if the mask says more than this.
    """
    of_keys, causal = keys_alone(call, who)
    if of_keys is None or of_keys.dtype == torch.bool:
        return of_keys, causal
    seen = of_keys > torch.finfo(of_keys.dtype).min / 2
    if bool((of_keys.masked_fill(~seen, 0) != 0).any()):
        raise CannotReplace(f"its mask adds numbers to the scores of keys, and {who} has no such scores")
    return seen, causal


def problem_of_mask(call: Call, who: str, causal: str) -> str | None:
    """Return why a method for encoders cannot use a call's mask: it is ``causal``, or says more; None if it can."""
    try:
        is_causal = call.causal or keys_alone(call, who)[1]
    except CannotReplace as e:
        return str(e)
    return causal if is_causal else None


def in_full(call: Call, compute: Callable[[torch.dtype], Tensor]) -> Tensor:
    """Run ``compute`` in float32, or in float64 for such queries, and return its result in the dtype of plain attention."""
    kind = call.query.device.type
    with torch.autocast(kind, enabled=False):
        out = compute(torch.float64 if call.query.dtype == torch.float64 else torch.float32)
    return out.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.value.dtype)


def refuse_dropout(call: Call, who: str) -> None:
    """Raise ``CannotReplace`` if a call drops attention weights."""
    if call.dropout:
        raise CannotReplace(
            f"it drops {call.dropout:.0%} of its weights, and {who} has none to drop: set the dropout of attention to 0"
        )
