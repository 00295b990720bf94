"""Exact attention in chunks of queries and keys that keeps no weights (Rabe & Staats 2021, arXiv:2112.05682).

For each chunk of queries, the chunks of keys are visited with the running maximum m and sum l of each row,

    m' = max(m, max_j s_j),  l' = l e^(m - m') + sum_j e^(s_j - m'),  o' = o e^(m - m') + sum_j e^(s_j - m') v_j,

and the output is o / l. The backward pass keeps ``lse = m + log l``, (B, H, L), and recomputes weights from it, as
``p = e^(s - lse)``: ``ds = p (dp - rowsum(do o))``. At most ``chunk^2`` weights per head exist at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Part:
    """One chunk of queries with one chunk of keys, for G query heads per key head.

    Args:
        call: the settings of the whole call.
        rows: the queries.
        columns: the keys.
    """

    def __init__(self, call: "_Settings", rows: slice, columns: slice) -> None:
        self.call, self.rows, self.columns = call, rows, columns

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, H', G, rows, columns), ``-inf`` where a key may not be seen."""
        call = self.call
        some = q[:, :, :, self.rows].flatten(2, 3)
        s = some @ k[:, :, self.columns].transpose(-1, -2) * call.scale
        s = s.unflatten(2, (call.groups, -1))
        if mask is not None:
            part = self.of_mask(mask)
            s = s.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else s + part.to(s.dtype)
        if call.causal:
            at = torch.arange(q.shape[3], device=q.device)[self.rows]
            s = s.masked_fill(at[:, None] < torch.arange(k.shape[2], device=q.device)[self.columns], -torch.inf)
        return s

    def of_mask(self, mask: Tensor) -> Tensor:
        """Return this part of a mask (B or 1, H or 1, L or 1, S or 1): (B or 1, H' or 1, G or 1, ., .)."""
        part = mask[:, :, self.rows] if mask.shape[2] > 1 else mask
        part = part[..., self.columns] if mask.shape[3] > 1 else part
        return part.unsqueeze(2) if mask.shape[1] == 1 else part.unflatten(1, (-1, self.call.groups))

    def kept(self, like: Tensor) -> Tensor:
        """Return the factor of dropout for each weight: 0 or 1 / (1 - p), the same at every call."""
        g = torch.Generator(like.device).manual_seed(
            self.call.seed + 2**20 * (self.rows.start or 0) + (self.columns.start or 0)
        )
        share = 1.0 - self.call.dropout
        return torch.empty_like(like, dtype=torch.float32).uniform_(generator=g).lt(share).to(like.dtype) / share


class _Settings:
    """The settings that are the same in all chunks."""

    def __init__(self, causal: bool, scale: float, dropout: float, seed: int, chunk: int) -> None:
        self.causal, self.scale, self.dropout, self.seed, self.chunk = causal, scale, dropout, seed, chunk
        self.groups = 1

    def parts(self, queries: int, keys: int) -> Iterator[tuple[slice, list[_Part]]]:
        """Yield chunks of queries, each with the chunks of keys that one of its queries may see."""
        for start in range(0, queries, self.chunk):
            rows = slice(start, min(start + self.chunk, queries))
            end = min(keys, rows.stop) if self.causal else keys
            columns = [slice(at, min(at + self.chunk, keys)) for at in range(0, end, self.chunk)]
            yield rows, [_Part(self, rows, some) for some in columns]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _Settings) -> Tensor:
        call.groups = q.shape[1] // k.shape[1]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        grouped = q.unflatten(1, (k.shape[1], call.groups))
        output = q.new_empty(*grouped.shape[:-1], v.shape[-1])
        lse = q.new_empty(grouped.shape[:-1], dtype=dtype)
        for rows, parts in call.parts(q.shape[2], k.shape[2]):
            shape = grouped[:, :, :, rows].shape[:-1]
            top = torch.full(shape, -torch.inf, dtype=dtype, device=q.device)
            total = torch.zeros(shape, dtype=dtype, device=q.device)
            sums = torch.zeros(*shape, v.shape[-1], dtype=dtype, device=q.device)
            for part in parts:
                s = part.scores(grouped, k, mask).to(dtype)
                new = torch.maximum(top, s.amax(-1))
                base = new.masked_fill(new == -torch.inf, 0.0)
                p, shrink = torch.exp(s - base[..., None]), torch.exp(top - base)
                total = total * shrink + p.sum(-1)
                p = p * part.kept(p) if call.dropout else p
                made = p.flatten(2, 3) @ v[:, :, part.columns].to(dtype)
                sums = sums * shrink[..., None] + made.unflatten(2, (call.groups, -1))
                top = new
            empty = total == 0
            output[:, :, :, rows] = (sums / total.masked_fill(empty, 1.0)[..., None]).to(q.dtype)
            lse[:, :, :, rows] = torch.where(empty, 0.0, top + total.log())
        ctx.call = call
        ctx.save_for_backward(q, k, v, mask, output, lse)
        return output.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, mask, output, lse = ctx.saved_tensors
        call: _Settings = ctx.call
        dtype = lse.dtype
        grouped = q.unflatten(1, (k.shape[1], call.groups))
        grad = grads[0].unflatten(1, (k.shape[1], call.groups)).to(dtype)
        dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (grouped, k, v))
        dmask = None if mask is None or not ctx.needs_input_grad[3] else torch.zeros_like(mask, dtype=dtype)
        for rows, parts in call.parts(q.shape[2], k.shape[2]):
            do = grad[:, :, :, rows]
            delta = (do * output[:, :, :, rows].to(dtype)).sum(-1, keepdim=True)
            do = do.flatten(2, 3)
            for part in parts:
                s = part.scores(grouped, k, mask).to(dtype)
                p = torch.exp(s - lse[:, :, :, rows, None])
                dp = (do @ v[:, :, part.columns].to(dtype).transpose(-1, -2)).unflatten(2, (call.groups, -1))
                kept = part.kept(p) if call.dropout else None
                seen = p if kept is None else p * kept
                dv[:, :, part.columns] += seen.flatten(2, 3).transpose(-1, -2) @ do
                ds = p * ((dp if kept is None else dp * kept) - delta)
                if dmask is not None:
                    into = part.of_mask(dmask)
                    into += ds.sum_to_size(into.shape)
                ds = ds.flatten(2, 3) * call.scale
                dq[:, :, :, rows] += (ds @ k[:, :, part.columns].to(dtype)).unflatten(2, (call.groups, -1))
                some = grouped[:, :, :, rows].flatten(2, 3).to(dtype)
                dk[:, :, part.columns] += ds.transpose(-1, -2) @ some
        dmask = None if dmask is None or mask is None else dmask.to(mask.dtype)
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask, None


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float,
    dropout: float = 0.0,
    chunk: int = 128,
) -> Tensor:
    """Return ``softmax(q k^T scale + mask) v``, exactly, with at most ``chunk^2`` weights per head at a time.

    The backward pass keeps the inputs, the output and one number per row. A query that may see no key gets zeros.
    Gradients cannot be differentiated again.

    Args:
        q: (B, H, L, E).
        k: (B, H', S, E), with H a multiple of H'.
        v: (B, H', S, E').
        mask: True where a key may be seen, or numbers to add to scores; four dimensions, broadcasts to (B, H, L, S).
        causal: whether query i sees only keys up to i.
        scale: the factor on the products.
        dropout: the fraction of weights to drop, drawn from the global generator.
        chunk: the number of queries, and of keys, at a time.
    """
    seed = int(torch.randint(2**40, ())) if dropout else 0
    return _Chunked.apply(q, k, v, mask, _Settings(causal, scale, dropout, seed, chunk))  # pyright: ignore[reportReturnType]
