"""Sends the pieces of matrices to the rank that owns them, and its results back to all ranks that hold a piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_eff.optim.optimizers._division.shards import Region, Spread, common, shape_of, within


@dataclass(frozen=True)
class Place:
    """One matrix: its region in a tensor that is spread over ranks, and the rank that computes with it.

    Attributes:
        spread: how the tensor is spread.
        region: the matrix's region in it.
        owner: the global rank of the owner.
    """

    spread: Spread
    region: Region
    owner: int

    @property
    def mine(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == dist.get_rank()

    @property
    def here(self) -> tuple[slice, ...]:
        """The place of what this rank holds of the matrix, in its piece of the tensor."""
        part = common(self.spread.here, self.region)
        assert part is not None, "this rank holds a part of the matrix"
        return within(part, self.spread.here)


@dataclass(frozen=True)
class _Described:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _order(parts: Sequence[_Described]) -> list[int]:
    """The order of tensors in a message: large elements first, so that each tensor begins at a multiple of its elements."""
    return sorted(range(len(parts)), key=lambda i: (-parts[i].dtype.itemsize, i))


class Messages:
    """Exchanges tensors between pairs of ranks, one message per pair and call.

    Attributes:
        sent_bytes: bytes of tensors that this rank has sent since :meth:`reset`. A collective counts as in a ring.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    def reset(self) -> None:
        """Begin to count at zero."""
        self.sent_bytes = 0

    def gather(self, places: Sequence[Place], pieces: Sequence[Tensor]) -> list[Tensor | None]:
        """Return each matrix on the rank that owns it, and None elsewhere.

        Args:
            places: the matrices, in the same order on all ranks of the mesh.
            pieces: this rank's piece of the tensor that holds each matrix.
        """
        me = dist.get_rank()
        sent: dict[int, list[Tensor]] = {}
        expected: dict[int, list[_Described]] = {}
        found: list[Tensor | None] = [None] * len(places)
        coming: list[tuple[int, Tensor]] = []  # the rank that sends, and the place of what it sends
        for i, (place, piece) in enumerate(zip(places, pieces, strict=True)):
            spread, regions = place.spread, place.spread.regions
            here = common(regions[me], place.region) if spread.sends(me, place.owner) else None
            own = None if here is None else piece[within(here, regions[me])]
            if not place.mine:
                if own is not None:
                    sent.setdefault(place.owner, []).append(own)
                continue
            if here == place.region:
                found[i] = own
                continue
            found[i] = whole = torch.empty(shape_of(place.region), dtype=piece.dtype, device=piece.device)
            if here is not None and own is not None:
                whole[within(here, place.region)].copy_(own)
            for rank in spread.senders(me):
                there = None if rank == me else common(regions[rank], place.region)
                if there is not None:
                    into = whole[within(there, place.region)]
                    expected.setdefault(rank, []).append(_Described.of(into))
                    coming.append((rank, into))
        got = self._exchange(sent, expected, pieces[0].device if pieces else torch.device("cpu"))
        for rank, into in coming:
            into.copy_(next(got[rank]))
        return found

    def scatter(
        self,
        places: Sequence[Place],
        wholes: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[Tensor | None]:
        """Return what this rank holds of each matrix, or None for nothing.

        Args:
            places: the matrices, in the same order on all ranks of the mesh.
            wholes: each matrix on the rank that owns it, and None elsewhere.
            dtypes: the dtype of each.
            device: the device of the results.
        """
        me = dist.get_rank()
        sent: dict[int, list[Tensor]] = {}
        expected: dict[int, list[_Described]] = {}
        found: list[Tensor | None] = [None] * len(places)
        coming: list[tuple[int, int]] = []
        for i, (place, whole, dtype) in enumerate(zip(places, wholes, dtypes, strict=True)):
            regions = place.spread.regions
            if place.mine:
                assert whole is not None, "the owner has the matrix"
                for rank, region in regions.items():
                    part = common(region, place.region)
                    if part is not None:
                        piece = whole[within(part, place.region)]
                        if rank == me:
                            found[i] = piece
                        else:
                            sent.setdefault(rank, []).append(piece.to(dtype))
                continue
            part = common(regions[me], place.region)
            if part is not None:
                expected.setdefault(place.owner, []).append(_Described(shape_of(part), dtype))
                coming.append((i, place.owner))
        got = self._exchange(sent, expected, device)
        for i, owner in coming:
            found[i] = next(got[owner])
        return found

    def _exchange(
        self, sent: dict[int, list[Tensor]], expected: dict[int, list[_Described]], device: torch.device
    ) -> dict[int, Iterator[Tensor]]:
        """Send tensors and return those that come, by rank and in their order."""
        operations: list[dist.P2POp] = []
        buffers: dict[int, Tensor] = {}
        for rank in sorted({*sent, *expected}):
            if rank in sent:
                order = _order([_Described.of(one) for one in sent[rank]])
                message = torch.cat([sent[rank][i].contiguous().view(-1).view(torch.uint8) for i in order])
                self.sent_bytes += message.numel()
                operations.append(dist.P2POp(dist.isend, message, rank))
            if rank in expected:
                size = sum(one.nbytes for one in expected[rank])
                buffers[rank] = torch.empty(size, dtype=torch.uint8, device=device)
                operations.append(dist.P2POp(dist.irecv, buffers[rank], rank))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return {rank: iter(_unpacked(buffer, expected[rank])) for rank, buffer in buffers.items()}

    # -- agreement

    def check(self, mesh: DeviceMesh, failure: Exception | None, what: str = "", *, who: str) -> None:
        """Raise on every rank of ``mesh`` if one has failed, or if the ranks do not agree; collective over the mesh.

        Args:
            mesh: the ranks.
            failure: this rank's exception, or None.
            what: what must be equal on all ranks.
            who: the name of the caller in messages.

        Raises:
            RuntimeError: if another rank has failed.
            ValueError: if ``what`` differs.
        """
        number = crc32(what.encode())
        flags = torch.tensor([failure is not None, number, -number], dtype=torch.int64, device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        failed, most, least = flags.tolist()
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError(f"{who}: the step failed on another rank. See the error that this rank printed.")
        if most != -least:
            raise ValueError(
                f"{who}: the ranks that share a parameter do not have gradients of the same parameters, or differ in how they"
                " multiply them. Compute the same loss on all of them, and give dtype= if their processors differ."
            )


def _unpacked(buffer: Tensor, parts: Sequence[_Described]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    start = 0
    for i in _order(parts):
        what = parts[i]
        found[i] = buffer[start : start + what.nbytes].view(what.dtype).view(what.shape)
        start += what.nbytes
    return [found[i] for i in range(len(parts))]


def merged(mesh: DeviceMesh, mine: dict[Any, Any]) -> dict[Any, Any]:
    """Return the union of every rank's mapping, for small values only; collective over ``mesh``."""
    for axis in range(mesh.ndim):
        said: list[dict[Any, Any]] = [{} for _ in range(mesh.size(axis))]
        dist.all_gather_object(said, mine, group=mesh.get_group(axis))
        mine = {key: value for one in said for key, value in one.items()}
    return mine
