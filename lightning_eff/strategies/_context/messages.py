"""Exchanges of tensors between the ranks that share a sequence, with exact gradients.

Every rank computes a loss of its own copy of the parameters, and all these losses are equal. Each function here is the exact
adjoint of its counterpart, so a backward pass gives each rank its own part of the gradient of the *sum* of the losses. The
mean of the parts over the ranks is the gradient of one loss. So the ranks average gradients as data-parallel ranks do,
wherever a parameter is used: in the blocks, outside of them, or in both.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_eff.strategies._context.agreeing import GATHER, SWAP, Meeting


def parts_of(length: int, count: int) -> tuple[int, ...]:
    """Return the lengths of ``count`` consecutive parts of ``length`` tokens, which differ by one at most."""
    return tuple(length // count + (i < length % count) for i in range(count))


@dataclass(frozen=True)
class Share:
    """A rank's tokens of a sequence.

    Attributes:
        group: the ranks that share the sequence.
        rank: this rank's index among them.
        lengths: the number of tokens of each rank.
        meeting: where ranks agree before each exchange; None outside of trials.
    """

    group: dist.ProcessGroup
    rank: int
    lengths: tuple[int, ...]
    meeting: Meeting | None = None

    @property
    def start(self) -> int:
        """The position of this rank's first token."""
        return sum(self.lengths[: self.rank])

    @property
    def length(self) -> int:
        """The number of this rank's tokens."""
        return self.lengths[self.rank]

    @property
    def whole(self) -> int:
        """The number of tokens of the sequence."""
        return sum(self.lengths)

    def of(self, whole: Tensor, dim: int) -> Tensor:
        """Return a copy of this rank's tokens along ``dim``. A view would keep the whole tensor in memory."""
        lengths = parts_of(whole.shape[dim], len(self.lengths))
        part = whole.narrow(dim, sum(lengths[: self.rank]), lengths[self.rank])
        return part.clone(memory_format=torch.contiguous_format)

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks along ``dim``, on every rank; collective."""
        out = _Gather.apply(part, dim, self)
        assert isinstance(out, Tensor)
        return out

    def to_heads(self, part: Tensor) -> Tensor:
        """Turn (B, H, tokens of this rank, E) into (B, heads of this rank, all tokens, E); collective."""
        heads = (part.shape[1] // len(self.lengths),) * len(self.lengths)
        return _swap(part, 1, heads, 2, self.lengths, self)

    def to_tokens(self, part: Tensor) -> Tensor:
        """Turn (B, heads of this rank, all tokens, E) into (B, H, tokens of this rank, E); collective."""
        heads = (part.shape[1],) * len(self.lengths)
        return _swap(part, 2, self.lengths, 1, heads, self)


def _exchange(pieces: list[Tensor], shapes: list[tuple[int, ...]], share: Share) -> list[Tensor]:
    """Send ``pieces[i]`` to rank i, and return the piece of shape ``shapes[i]`` from each rank i."""
    if share.meeting is not None:
        share.meeting.agree(SWAP)
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    got = sent.new_empty(sum(sizes))
    dist.all_to_all_single(got, sent, sizes, [piece.numel() for piece in pieces], group=share.group)
    return [part.view(shape) for part, shape in zip(got.split(sizes), shapes, strict=True)]


def _sized(shape: torch.Size, dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


class _Swap(torch.autograd.Function):
    """Divides a tensor along one dimension instead of another one (Jacobs et al. 2023, section 3.1)."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, cut: int, cuts: tuple[int, ...], join: int, joins: tuple[int, ...], share: Share
    ) -> Tensor:
        ctx.given = cut, cuts, join, joins, share
        shapes = [_sized(torch.Size(_sized(x.shape, cut, cuts[share.rank])), join, size) for size in joins]
        return torch.cat(_exchange([*x.split(cuts, cut)], shapes, share), join)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cut, cuts, join, joins, share = ctx.given
        return _swap(grads[0], join, joins, cut, cuts, share), None, None, None, None, None


def _swap(x: Tensor, cut: int, cuts: tuple[int, ...], join: int, joins: tuple[int, ...], share: Share) -> Tensor:
    """Send the parts of ``x`` along ``cut`` to the ranks, and join what arrives along ``join``."""
    out = _Swap.apply(x, cut, cuts, join, joins, share)
    assert isinstance(out, Tensor)
    return out


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks. The gradient of a part is the sum over the ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, dim: int, share: Share) -> Tensor:
        lengths = share.lengths
        ctx.dim, ctx.share, ctx.shape = dim, share, part.shape
        most = max(lengths)
        if part.shape[dim] < most:  # the messages of a gather are equally long
            more = part.new_zeros(_sized(part.shape, dim, most - part.shape[dim]))
            part = torch.cat([part, more], dim)
        part = part.contiguous()
        found = [torch.empty_like(part) for _ in lengths]
        if share.meeting is not None:
            share.meeting.agree(GATHER)
        dist.all_gather(found, part, group=share.group)
        return torch.cat([each.narrow(dim, 0, size) for each, size in zip(found, lengths, strict=True)], dim)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        pieces = [*grads[0].split(ctx.share.lengths, ctx.dim)]
        got = _exchange(pieces, [tuple(ctx.shape)] * len(pieces), ctx.share)
        return torch.stack(got).sum(0), None, None
