"""Fused weights: rows of several sections, each split over the ranks, without moving what is stored.

A fused projection holds q, k and v (or gate and up) below one another. A rank needs its part of *each* section, but
stored contiguously it holds a part of one. Stored permuted, checkpoints would be of another model; so the rows stay
where they are (``DTensor.full_tensor()`` is the plain weight) and ranks exchange rows in one all-to-all when the weight
is read, and gradients of rows in one all-to-all back.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class Routes:
    """Which rows one rank sends and receives.

    Attributes:
        send: positions among the rank's stored rows, in the order in which they are sent, shape (rows,).
        send_counts: rows for each rank.
        receive: positions among the rows it computes with, in the order in which they arrive, shape (rows,).
        receive_counts: rows from each rank.
    """

    send: Tensor
    send_counts: tuple[int, ...]
    receive: Tensor
    receive_counts: tuple[int, ...]


def routes(sections: tuple[int, ...], size: int, rank: int) -> Routes:
    """How rank ``rank`` of ``size`` gets its part of every section.

    Args:
        sections: rows of each section; each a multiple of ``size``.
        size: ranks.
        rank: in [0, size).
    """
    starts = [sum(sections[:i]) for i in range(len(sections))]
    wanted = [
        torch.cat(
            [torch.arange(s + r * n // size, s + (r + 1) * n // size) for s, n in zip(starts, sections, strict=True)]
        )
        for r in range(size)
    ]
    each = sum(sections) // size
    holders = [rows // each for rows in wanted]
    send = [wanted[r][holders[r] == rank] - rank * each for r in range(size)]
    receive = [(holders[rank] == r).nonzero().flatten() for r in range(size)]
    return Routes(torch.cat(send), tuple(map(len, send)), torch.cat(receive), tuple(map(len, receive)))


class _AllToAll(torch.autograd.Function):
    """Rows (rows, ...) to the ranks that compute with them; the backward pass takes gradients back."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, way: Routes, group: dist.ProcessGroup) -> Tensor:
        ctx.way, ctx.group = way, group
        send, arrived = rows[way.send.to(rows.device)].contiguous(), torch.empty_like(rows)
        dist.all_to_all_single(arrived, send, list(way.receive_counts), list(way.send_counts), group=group)
        out = torch.empty_like(arrived)
        out[way.receive.to(rows.device)] = arrived
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        way: Routes = ctx.way
        (grad,) = grads
        send, arrived = grad[way.receive.to(grad.device)].contiguous(), torch.empty_like(grad)
        dist.all_to_all_single(arrived, send, list(way.send_counts), list(way.receive_counts), group=ctx.group)
        out = torch.empty_like(arrived)
        out[way.send.to(grad.device)] = arrived
        return out, None, None


class Exchange:
    """Callable on this rank's stored rows: returns the rows that it computes with, sections in their order."""

    def __init__(self, sections: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self.sections, self.group = sections, group
        self.way = routes(sections, dist.get_world_size(group), dist.get_rank(group))

    def __call__(self, rows: Tensor) -> Tensor:
        out = _AllToAll.apply(rows.contiguous(), self.way, self.group)
        assert isinstance(out, Tensor)
        return out
