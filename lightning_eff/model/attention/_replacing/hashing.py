"""Attention within the buckets of a locality-sensitive hash, by sorted chunks (Kitaev et al. 2020, section 2).

Queries and keys are sorted by their bucket; a chunk of queries meets the keys of a window of as many places, twice its length,
that begins where the bucket of its first query does, and of these its queries see those of their own bucket.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def buckets_of(x: Tensor, rotations: Tensor) -> Tensor:
    """``argmax [x R; -x R]``: (.., rounds, n), from 0 to the number of buckets.

    Args:
        x: (.., n, E).
        rotations: R, (rounds, E, buckets / 2); with no columns all are in one bucket.
    """
    if rotations.shape[-1] == 0:
        return torch.zeros(*x.shape[:-2], len(rotations), x.shape[-2], dtype=torch.long, device=x.device)
    turned = x.unsqueeze(-3) @ rotations.to(x.dtype)
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


class Round(NamedTuple):
    """Of one round, for C chunks of m queries, 2 m keys each; sizes are (N, ..), N for samples and heads.

    Attributes:
        queries: which query each place of a chunk has, (N, C, m).
        keys: which key each place of its window has, (N, C, 2 m).
        starts: for each query, at which rank its window begins, (N, L).
        ranks: of each key, (N, S).
    """

    queries: Tensor
    keys: Tensor
    starts: Tensor
    ranks: Tensor


def arranged(of_queries: Tensor, of_keys: Tensor, chunk: int, *, causal: bool) -> Round:
    """How chunks of queries meet windows of keys.

    Places behind the last query repeat it, and the window is moved where it would end behind the last key.

    Args:
        of_queries: buckets, (N, L).
        of_keys: buckets, (N, S).
        chunk: m.
        causal: whether all keys that count are before the query.
    """
    count, length = of_queries.shape
    keys = of_keys.shape[1]
    sorted_queries, order = of_queries.sort(dim=-1, stable=True)
    sorted_keys, key_order = of_keys.sort(dim=-1, stable=True)
    chunks = -(-length // chunk)
    at = torch.arange(chunks * chunk, device=order.device).clamp_max(length - 1)
    queries = order[:, at].view(count, chunks, chunk)
    first = sorted_queries[:, at].view(count, chunks, chunk)[..., 0].contiguous()
    window = min(2 * chunk, keys)
    start = torch.searchsorted(sorted_keys, first).clamp_max(keys - window)
    back = chunk if causal else chunk // 2  # of the keys before
    # a long bucket goes on for several chunks, whose windows move along with them
    inside = torch.arange(chunks, device=order.device) * chunk - torch.searchsorted(sorted_queries, first)
    last = torch.searchsorted(sorted_keys, first, right=True) - window
    start = torch.maximum(start, torch.minimum(start + inside.clamp_min(0) - back, last)).clamp(0, keys - window)
    places = start[..., None] + torch.arange(window, device=order.device)
    found = key_order.gather(1, places.flatten(1)).view_as(places)
    starts = torch.empty_like(of_queries).scatter_(
        1, queries.flatten(1), start[..., None].expand_as(queries).flatten(1)
    )
    ranks = key_order.argsort(dim=-1)
    return Round(queries, found, starts, ranks)


def hashed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    *,
    scale: float,
    causal: bool,
    there: Tensor | None,
    chunk: int,
) -> Tensor:
    """Attention to the keys that share a bucket with the query, and its window, in one of the rounds: (N, L, E').

    The rounds are put together as in the paper: each pair counts once, however many rounds it is in. A query that meets no key
    sees the one of its own place.

    Args:
        q: (N, L, E).
        k: (N, L, E).
        v: (N, L, E').
        of_queries: buckets, (N, rounds, L).
        of_keys: likewise.
        scale: of the products.
        causal: whether query i sees keys up to i alone.
        there: which keys may be seen, (N, L), or None for all.
        chunk: m.
    """
    rounds = [
        arranged(b, c, chunk, causal=causal) for b, c in zip(of_queries.unbind(1), of_keys.unbind(1), strict=True)
    ]
    outputs, sums = list[Tensor](), list[Tensor]()
    row = torch.arange(len(q), device=q.device)[:, None, None]
    for r, one in enumerate(rounds):
        at, keys = one.queries, one.keys
        seen = torch.gather(of_queries[:, r], 1, at.flatten(1)).view_as(at)[..., None] == torch.gather(
            of_keys[:, r], 1, keys.flatten(1)
        ).view_as(keys).unsqueeze(-2)
        if causal:
            seen = seen & (keys.unsqueeze(-2) <= at[..., None])
        if there is not None:
            seen = seen & there[row, keys].unsqueeze(-2)
        scores = q[row, at] @ k[row, keys].transpose(-1, -2) * scale
        if len(rounds) > 1:
            scores = scores - _times(rounds, of_queries, of_keys, at, keys, row).to(scores.dtype).log()
        scores = scores.masked_fill(~seen, -torch.inf)
        none = ~seen.any(-1)
        total = scores.masked_fill(none[..., None], 0.0).logsumexp(-1).masked_fill(none, -torch.inf)
        weights = torch.exp(scores - total.masked_fill(none, 0.0)[..., None])
        made = (weights @ v[row, keys]).flatten(1, 2)
        outputs.append(_back(made, at, q.shape[1]))
        sums.append(_back(total.flatten(1, 2)[..., None], at, q.shape[1]))
    every = torch.stack(sums)
    alone = (every == -torch.inf).all(0)
    shares = every.masked_fill(alone, 0.0).softmax(0)
    found = (shares * torch.stack(outputs)).sum(0)
    return torch.where(alone, v, found)


def _back(made: Tensor, at: Tensor, length: int) -> Tensor:
    """What chunks made, in the order of the queries: (N, L, .)."""
    count = at.shape[0]
    order = torch.empty(count, length, dtype=torch.long, device=at.device)
    places = torch.arange(at[0].numel(), device=at.device).expand(count, -1)
    order.scatter_(1, at.flatten(1)[:, :length], places[:, :length])
    return made.gather(1, order[..., None].expand(-1, -1, made.shape[-1]))


def _times(rounds: list[Round], of_queries: Tensor, of_keys: Tensor, at: Tensor, keys: Tensor, row: Tensor) -> Tensor:
    """In how many rounds a pair of a round meets, at least 1: (N, C, m, 2 m)."""
    found = torch.zeros(*at.shape, keys.shape[-1], dtype=torch.long, device=at.device)
    for r, other in enumerate(rounds):
        same = of_queries[:, r][row, at][..., None] == of_keys[:, r][row, keys].unsqueeze(-2)
        ranks, starts = other.ranks[row, keys].unsqueeze(-2), other.starts[row, at][..., None]
        found += same & (ranks >= starts) & (ranks < starts + other.keys.shape[-1])
    return found.clamp_min(1)
