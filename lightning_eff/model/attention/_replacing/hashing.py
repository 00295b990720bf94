"""Attention within the buckets of a locality-sensitive hash, in chunks (Kitaev et al. 2020, section 2).

A query sees a window of the keys in its bucket. The window follows from the query's rank, the number of visible keys of
the bucket up to its own place. Later tokens and hidden keys do not affect it. The paper sorts all tokens together, so
the bounds of a chunk, and the earlier keys that a query sees, depend on later tokens and on padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def buckets_of(x: Tensor, rotations: Tensor) -> Tensor:
    """Return ``argmax [x R; -x R]``: (.., rounds, n), from 0 to the number of buckets.

    Args:
        x: (.., n, E).
        rotations: R, (rounds, E, buckets / 2); without columns, everything is in one bucket.
    """
    if rotations.shape[-1] == 0:
        return torch.zeros(*x.shape[:-2], len(rotations), x.shape[-2], dtype=torch.long, device=x.device)
    turned = x.unsqueeze(-3) @ rotations.to(x.dtype)
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


class Round(NamedTuple):
    """One round: T chunks of m queries, each with a window of w keys. N counts samples and heads.

    Attributes:
        queries: the query in each place of a chunk, (N, T, m). Unused places hold query 0.
        slots: the place of each query among the T m, (N, L).
        keys: the key in each place of a chunk's window, (N, T, w).
        inside: which places of a window hold a key, (N, T, w).
        of_queries: the bucket of each query, (N, L).
        of_keys: the bucket of each key, (N, S). Hidden keys are in a bucket without queries.
        starts: the rank at which each query's window begins, (N, L).
        ranks: the rank of each key in its bucket, by position, (N, S).
    """

    queries: Tensor
    slots: Tensor
    keys: Tensor
    inside: Tensor
    of_queries: Tensor
    of_keys: Tensor
    starts: Tensor
    ranks: Tensor


def num_chunks(queries: int, keys: int, buckets: int, chunk: int) -> int:
    """Return T, the largest number of chunks that any hash needs: each pair of a bucket and a window starts a new chunk."""
    groups = min(queries, (keys + buckets * chunk - 1) // chunk)
    return min(queries, (queries + groups * (chunk - 1)) // chunk)


def arranged(
    of_queries: Tensor, of_keys: Tensor, chunk: int, buckets: int, *, causal: bool, there: Tensor | None = None
) -> Round:
    """Put queries into chunks whose members share a bucket and a window of keys.

    A query of rank r belongs to part ``c = r // m`` of its bucket. It sees the keys of ranks ``[c m - m, c m + m)`` if
    attention is causal, else ``[c m - m/2, c m + 3 m/2)``; the window begins at 0 where that is negative.

    Args:
        of_queries: buckets, (N, L).
        of_keys: buckets, (N, S).
        chunk: m.
        buckets: the number of buckets.
        causal: whether query i sees only keys up to i.
        there: which keys may be seen, (N, S), or None for all.
    """
    count, length = of_queries.shape
    keys, device = of_keys.shape[1], of_queries.device
    if there is not None:
        of_keys = of_keys.masked_fill(~there, buckets)
    sorted_keys, key_order = of_keys.sort(dim=-1, stable=True)
    every = torch.arange(buckets + 1, device=device).expand(count, -1).contiguous()
    begins = torch.searchsorted(sorted_keys, every)
    ranks = key_order.argsort(dim=-1) - begins.gather(1, of_keys)

    place = torch.arange(length, device=device)
    by_place = sorted_keys * keys + key_order  # ascending: the keys of a bucket are in the order of their places
    up_to = torch.searchsorted(by_place, of_queries * keys + place.clamp_max(keys - 1), right=True)
    part = (up_to - begins.gather(1, of_queries) - 1).clamp_min(0) // chunk
    starts = (part * chunk - (chunk if causal else chunk // 2)).clamp_min(0)

    group, order = (of_queries * (keys // chunk + 1) + part).sort(dim=-1, stable=True)
    within = (place - torch.searchsorted(group, group)) % chunk
    of_chunk = (within == 0).long().cumsum(-1) - 1
    slots = torch.empty_like(order).scatter_(1, order, of_chunk * chunk + within)
    chunks = num_chunks(length, keys, buckets, chunk)
    queries = torch.zeros(count, chunks * chunk, dtype=torch.long, device=device)
    queries.scatter_(1, slots, place.expand(count, -1))
    first = torch.zeros(count, chunks, dtype=torch.long, device=device)
    first.scatter_(1, of_chunk, (begins.gather(1, of_queries) + starts).gather(1, order))  # one value for each chunk
    places = first[..., None] + torch.arange(min(2 * chunk, keys), device=device)
    found = key_order.gather(1, places.clamp_max(keys - 1).flatten(1)).view_as(places)
    return Round(queries.view(count, chunks, chunk), slots, found, places < keys, of_queries, of_keys, starts, ranks)


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
    buckets: int,
) -> Tensor:
    """Attend to the keys that share the query's bucket and window in one of the rounds: (N, L, E').

    Rounds are combined as in the paper: each pair counts once, however many rounds it is in. A query that meets no key
    sees the key of its own place.

    Args:
        q: (N, L, E).
        k: (N, L, E).
        v: (N, L, E').
        of_queries: buckets, (N, rounds, L).
        of_keys: buckets, (N, rounds, L).
        scale: the factor on the products.
        causal: whether query i sees only keys up to i.
        there: which keys may be seen, (N, L), or None for all.
        chunk: m.
        buckets: the number of buckets.
    """
    rounds = [
        arranged(b, c, chunk, buckets, causal=causal, there=there)
        for b, c in zip(of_queries.unbind(1), of_keys.unbind(1), strict=True)
    ]
    outputs, sums = list[Tensor](), list[Tensor]()
    row = torch.arange(len(q), device=q.device)[:, None, None]
    for one in rounds:
        at, keys = one.queries, one.keys
        seen = one.inside.unsqueeze(-2) & (one.of_queries[row, at][..., None] == one.of_keys[row, keys].unsqueeze(-2))
        if causal:
            seen = seen & (keys.unsqueeze(-2) <= at[..., None])
        scores = q[row, at] @ k[row, keys].transpose(-1, -2) * scale
        if len(rounds) > 1:
            scores = scores - _times(rounds, at, keys, row).to(scores.dtype).log()
        scores = scores.masked_fill(~seen, -torch.inf)
        none = ~seen.any(-1)
        total = scores.masked_fill(none[..., None], 0.0).logsumexp(-1).masked_fill(none, -torch.inf)
        weights = torch.exp(scores - total.masked_fill(none, 0.0)[..., None])
        made = (weights @ v[row, keys]).flatten(1, 2)
        outputs.append(_back(made, one.slots))
        sums.append(_back(total.flatten(1, 2)[..., None], one.slots))
    every = torch.stack(sums)
    alone = (every == -torch.inf).all(0)
    shares = every.masked_fill(alone, 0.0).softmax(0)
    found = (shares * torch.stack(outputs)).sum(0)
    return torch.where(alone, v, found)


def _back(made: Tensor, slots: Tensor) -> Tensor:
    """Return the results of chunks in the order of the queries: (N, L, .)."""
    return made.gather(1, slots[..., None].expand(-1, -1, made.shape[-1]))


def _times(rounds: list[Round], at: Tensor, keys: Tensor, row: Tensor) -> Tensor:
    """Return the number of rounds in which each pair of a round meets, at least 1: (N, T, m, w)."""
    found = torch.zeros(*at.shape, keys.shape[-1], dtype=torch.long, device=at.device)
    for other in rounds:
        same = other.of_queries[row, at][..., None] == other.of_keys[row, keys].unsqueeze(-2)
        ranks, starts = other.ranks[row, keys].unsqueeze(-2), other.starts[row, at][..., None]
        found += same & (ranks >= starts) & (ranks < starts + other.keys.shape[-1])
    return found.clamp_min(1)
