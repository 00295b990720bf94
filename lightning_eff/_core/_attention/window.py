"""Exact attention within a window of keys, as pure functions.

A query at position i sees keys at j with ``0 <= i - j < w`` (causal), or ``|i - j| < w``. Shapes: queries (B, H, L, E),
keys (B, H', L, E), values (B, H', L, E'), masks that broadcast to (B, H, L, L).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def band(length: int, window: int, device: torch.device, queries: int | None = None) -> Tensor:
    """Build the mask ``|i - j| < w`` of the keys that each query may see: (L, L), bool, or its last ``queries`` rows."""
    places = torch.arange(length, device=device)
    return (places[length - (length if queries is None else queries) :, None] - places[None, :]).abs() < window


def within(mask: Tensor, seen: Tensor) -> Tensor:
    """Restrict an attention mask to the band.

    A query that sees something, but nothing within its window, sees itself. This happens to padding after a window of padding.

    Args:
        mask: True where a key is visible, or a number to add to the score; as ``seen``, or broadcastable to it.
        seen: the band, (L, L), bool, or its last rows.
    """
    queries, length = seen.shape
    eye = torch.eye(length, dtype=torch.bool, device=seen.device)[length - queries :]
    if mask.dtype == torch.bool:
        new = mask & seen
        return new | (~new.any(-1, keepdim=True) & mask.any(-1, keepdim=True) & eye)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    new = mask.masked_fill(~seen, -torch.inf)
    lost = (hidden | ~seen).all(-1, keepdim=True) & ~hidden.all(-1, keepdim=True)
    return new.masked_fill(lost & eye, 0.0)


def chunk_of(length: int) -> int:
    """The number of queries per chunk: a sixteenth of the length, to limit the number of calls, and at least 16."""
    return max(16, -(-length // 16))


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, window: int, is_causal: bool, **options: Any
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` of L queries and keys in a window of w < L, shape (.., L, E').

    A chunk of c queries uses only the keys that one of them sees: at most ``c + w - 1`` (causal) or ``c + 2 (w - 1)`` of the L,
    and fewer at the ends of the sequence. A mask hides keys outside the window within these.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        mask: the mask of the call, or None.
        window: w >= 1.
        is_causal: as in the call.
        options: the other arguments of the call.
    """
    length = q.shape[-2]
    seen = band(length, window, q.device)
    if is_causal:
        seen = seen.tril()
    if mask is not None:
        seen = within(mask.expand(*mask.shape[:-2], length, length), seen)
    found: list[Tensor] = []
    start = 0
    for some in q.split(chunk_of(length), dim=-2):
        stop = start + some.shape[-2]
        keys = slice(max(0, start - window + 1), stop if is_causal else min(length, stop + window - 1))
        chosen = seen[..., start:stop, keys]
        found.append(F.scaled_dot_product_attention(some, k[..., keys, :], v[..., keys, :], chosen, **options))
        start = stop
    return torch.cat(found, dim=-2)
