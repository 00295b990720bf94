"""Splits each section of a fused weight over the ranks, without changing the order of stored rows.

A fused projection stores q, k and v (or gate and up) below one another. A rank needs its part of *each* section, but a
contiguous part of the rows belongs to one section. A permuted order would change checkpoints. So the rows keep their order
(``DTensor.full_tensor()`` is the plain weight). Ranks exchange rows in one all-to-all when the weight is read, and gradients
of rows in another one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class Routes:
    """The rows that one rank sends and receives.

    Attributes:
        send: positions among the rank's stored rows in sending order, shape (rows,).
        send_counts: number of rows for each rank.
        receive: positions among the rows for its computation in order of arrival, shape (rows,).
        receive_counts: number of rows from each rank.
    """

    send: Tensor
    send_counts: tuple[int, ...]
    receive: Tensor
    receive_counts: tuple[int, ...]


def routes(sections: tuple[int, ...], size: int, rank: int) -> Routes:
    """Return the routes by which rank ``rank`` of ``size`` gets its part of every section.

    Args:
        sections: rows of each section, each a multiple of ``size``.
        size: number of ranks.
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
    """Sends rows (rows, ...) to the ranks that compute with them, and gradients back in the backward pass."""

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
    """Turns this rank's stored rows into the rows for its computation, with sections in order."""

    def __init__(self, sections: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self.sections, self.group = sections, group
        self.way = routes(sections, dist.get_world_size(group), dist.get_rank(group))

    def __call__(self, rows: Tensor) -> Tensor:
        out = _AllToAll.apply(rows.contiguous(), self.way, self.group)
        assert isinstance(out, Tensor)
        return out
