"""Where the pieces of a DTensor lie, and which region of it each of its matrices takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_eff.optim.optimizers._matrices import Layout

Region = tuple[tuple[int, int], ...]  #: the first index and the one after the last, for each dimension


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(stop - start for start, stop in region)


def common(a: Region, b: Region) -> Region | None:
    """Return what two regions of one tensor have in common, or None for nothing."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return found if all(start < stop for start, stop in found) else None


def within(region: Region, frame: Region) -> tuple[slice, ...]:
    """Return the place of ``region`` in a tensor that holds the region ``frame``."""
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(region, frame, strict=True))


@dataclass(frozen=True)
class Spread:
    """How a tensor lies on the ranks of a mesh.

    Attributes:
        shape: the shape of the whole tensor.
        mesh: the mesh.
        placements: the placements on each of its axes, all of them shards or copies.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> "Spread":
        """Return the spread of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))

    @classmethod
    def copied(cls, shape: Sequence[int], mesh: DeviceMesh) -> "Spread":
        """Return the spread of a tensor that every rank of ``mesh`` has whole."""
        return cls(tuple(shape), mesh, (Replicate(),) * mesh.ndim)

    @property
    def regions(self) -> dict[int, Region]:
        """The region of each rank of the mesh."""
        return _regions(self)[0]

    @property
    def here(self) -> Region:
        """The region of this rank."""
        return self.regions[dist.get_rank()]

    def senders(self, owner: int) -> list[int]:
        """Return the ranks that send their pieces to ``owner``: those that hold the same copy of the tensor."""
        copy_of = _regions(self)[1]
        return [rank for rank, copy in copy_of.items() if copy == copy_of[owner]]

    def sends(self, rank: int, owner: int) -> bool:
        """Whether ``rank`` is one of them."""
        copy_of = _regions(self)[1]
        return copy_of[rank] == copy_of[owner]

    def wrap(self, here: Tensor) -> DTensor:
        """Return a DTensor; ``here`` is this rank's piece."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            here, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )


@lru_cache(maxsize=4096)
def _regions(spread: Spread) -> tuple[dict[int, Region], dict[int, tuple[int, ...]]]:
    """The region of each rank, and which of several copies of the tensor it belongs to.

    Raises:
        ValueError: if a piece is not one region of the tensor.
    """
    ranks = spread.mesh.mesh
    regions: dict[int, Region] = {}
    copy_of: dict[int, tuple[int, ...]] = {}
    for at in product(*map(range, ranks.shape)):
        indices = [torch.arange(size) for size in spread.shape]
        for axis, placement in enumerate(spread.placements):
            if placement.is_replicate():
                continue
            if placement.is_partial():
                raise ValueError(f"a tensor of shape {spread.shape} is a pending sum ({spread.placements}).")
            dim, count = placement.dim, ranks.shape[axis]
            # FSDP2 divides what tensor parallelism has divided already: each of split_factor pieces by itself
            parts = indices[dim].chunk(getattr(placement, "split_factor", 1))
            shares = [part.chunk(count) for part in parts]
            indices[dim] = torch.cat(
                [share[at[axis]] for share in shares if at[axis] < len(share)] or [indices[dim][:0]]
            )
        region: list[tuple[int, int]] = []
        for index in indices:
            start = int(index[0]) if len(index) else 0
            if len(index) and int(index[-1]) - start + 1 != len(index):
                raise ValueError(f"a tensor of shape {spread.shape} is divided in strips ({spread.placements}).")
            region.append((start, start + len(index)))
        rank = int(ranks[at])
        regions[rank] = tuple(region)
        copy_of[rank] = tuple(k for k, p in zip(at, spread.placements, strict=True) if p.is_replicate())
    return regions, copy_of


@dataclass(frozen=True)
class Unit:
    """One matrix of a parameter.

    Attributes:
        region: its region in the parameter.
        layout: the layout of the region's tensor, with one matrix; None for a tensor that is used unchanged.
    """

    region: Region
    layout: Layout | None


def units(layout: Layout | None, shape: Sequence[int]) -> list[Unit]:
    """Return the matrices of a parameter in the order of :meth:`Layout.apart`."""
    whole = whole_region(shape)
    if layout is None or layout.form == "convolution":
        return [Unit(whole, layout)]
    out = len(shape) - (1 if layout.transposed else 2)
    parts, one = layout.parts or (shape[out],), replace(layout, parts=())
    found: list[Unit] = []
    for k in range(shape[0]) if layout.form == "stack" else (None,):
        start = 0
        for size in parts:
            region = list(whole)
            region[out] = (start, start + size)
            if k is not None:
                region[0] = (k, k + 1)
            found.append(Unit(tuple(region), one))
            start += size
    return found


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor, which shares its memory, or a plain tensor unchanged."""
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wait = getattr(found, "wait", None)  # a piece that is still on its way
    return found if wait is None else wait()


def aligned(grad: Tensor, p: Tensor) -> Tensor:
    """Return this rank's piece of a gradient, divided like its parameter ``p``."""
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def mismatch(p: Tensor, *, who: str) -> Exception | None:
    """Return the exception to raise if this rank's piece of a DTensor is not the one that its placements say."""
    if not isinstance(p, DTensor):
        return None
    try:
        here = shape_of(Spread.of(p).here)
    except ValueError as error:
        return ValueError(f"{who}: {error} Use placements of shards and copies.")
    if here == tuple(local(p).shape):
        return None
    return ValueError(
        f"{who}: a parameter of shape {tuple(p.shape)} is not divided as its placements {p.placements} say, because this rank"
        f" holds {tuple(local(p).shape)}. Use a number of ranks that divides its rows."
    )
