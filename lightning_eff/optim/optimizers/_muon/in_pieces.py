"""Steps of matrices that lie in pieces on several ranks: one rank owns each matrix, and orthogonalizes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._division.equal_work import Division
from lightning_eff.optim.optimizers._division.messages import Place
from lightning_eff.optim.optimizers._division.shards import Spread, Unit, aligned, local, mismatch, shape_of, units
from lightning_eff.optim.optimizers._matrices import Layout
from lightning_eff.optim.optimizers._muon.orthogonalization import orthogonalize, product_dtype
from lightning_eff.optim.optimizers._muon.scratch import Scratch
from lightning_eff.optim.optimizers._muon.steps import (
    Held,
    Piece,
    chunks,
    normalize_stack,
    second_moments,
    take_part,
)


@dataclass(frozen=True)
class _Job:
    """A matrix (out, in), or a convolution as one.

    Attributes:
        at: the index of its parameter in the chunk.
        shape: (1, out, in).
        dtype: the dtype of the products.
    """

    at: int
    unit: Unit
    shape: torch.Size
    dtype: torch.dtype


class InPieces:
    """One step of :class:`Muon` on DTensors. Leaving the context raises on all ranks if one has failed.

    Args:
        optimizer: Muon.
        division: finds the owners, and exchanges pieces.
        layouts: the matrices in each parameter.
        dtype: the given dtype of the products, or None.
        scratch: memory to work in.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        division: Division,
        layouts: Mapping[Tensor, Layout],
        dtype: torch.dtype | None,
        scratch: Scratch,
    ) -> None:
        self._state, self._division, self._layouts = optimizer.state, division, layouts
        self._dtype, self._scratch = dtype, scratch
        self._failure: Exception | None = None
        self._owners: dict[Tensor, list[int]] = {}
        self._matrices = [p for g in optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"]]

    def __enter__(self) -> Self:
        self._division.forget()
        for mesh in self._meshes():
            mine = [(i, p) for i, p in enumerate(self._matrices) if _lies_on(p, mesh) and p.grad is not None]
            for _, p in mine:
                self._failure = self._failure or mismatch(p, who="Muon")
            jobs = {p: list(self._jobs(0, p)) for _, p in mine}
            self._check(mesh, str([(i, tuple(p.shape), [job.dtype for job in jobs[p]]) for i, p in mine]))
            costs = [job.shape[1] * job.shape[2] * min(job.shape[1:]) for some in jobs.values() for job in some]
            owners = iter(self._division.owners(mesh, costs))
            self._owners |= {p: [next(owners) for _ in some] for p, some in jobs.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for mesh in self._meshes() if kind is None else ():
            self._check(mesh)

    def _check(self, mesh: DeviceMesh, what: str = "") -> None:
        failure, self._failure = self._failure, None
        self._division.messages.check(mesh, failure, what, who="Muon")

    def _meshes(self) -> list[DeviceMesh]:
        """The meshes of matrices, in an order that is equal on all ranks of each."""
        return list(dict.fromkeys(p.device_mesh for p in self._matrices if isinstance(p, DTensor)))

    def _jobs(self, at: int, p: Tensor) -> Iterator[_Job]:
        for unit in units(self._layouts[p], p.shape):
            empty = torch.empty(shape_of(unit.region), device="meta")
            assert unit.layout is not None
            shape = unit.layout.blocks(empty)[0].shape
            yield _Job(at, unit, shape, product_dtype(shape, p.device, self._dtype))

    def step(self, mesh: DeviceMesh, held: Sequence[Held], method: str, num_iterations: int) -> None:
        """Update parameters of one dtype on ``mesh``."""
        for chunk in chunks(held, mesh.size()):
            self._step_chunk(mesh, chunk, method, num_iterations)

    def _step_chunk(self, mesh: DeviceMesh, held: list[Held], method: str, num_iterations: int) -> None:
        messages = self._division.messages
        jobs = [job for at, (_, p) in enumerate(held) for job in self._jobs(at, p)]
        owners = [who for _, p in held for who in self._owners[p]]
        spreads = [Spread.of(p) for _, p in held if isinstance(p, DTensor)]
        places = [Place(spreads[job.at], job.unit.region, who) for job, who in zip(jobs, owners, strict=True)]
        momenta = self._momentum(held)
        got = messages.gather(places, [momenta[job.at] for job in jobs])
        moments = self._moments(held, jobs)
        mine = [k for k, place in enumerate(places) if place.mine]
        done: list[Tensor | None] = [None] * len(jobs)
        try:
            found = self._orthogonal(held, [(jobs[k], got[k], moments[k]) for k in mine], method, num_iterations)
        except Exception as error:  # raised when no rank waits for this one any more
            self._failure = self._failure or error
            found = [
                torch.zeros(shape_of(jobs[k].unit.region), dtype=jobs[k].dtype, device=mesh.device_type) for k in mine
            ]
        for k, one in zip(mine, found, strict=True):
            done[k] = one
        neurons = [k for k, one in enumerate(moments) if one is not None]
        everywhere = [Place(Spread.copied(moments[k].shape, mesh), _whole(moments[k]), owners[k]) for k in neurons]
        parts = messages.scatter(
            [*places, *everywhere],
            [*done, *(moments[k] for k in neurons)],
            [*(job.dtype for job in jobs), *[torch.float32] * len(neurons)],
            momenta[0].device,
        )
        for k, part in zip(neurons, parts[len(jobs) :], strict=True):
            moments[k].copy_(part)
        for job, place, part in zip(jobs, places, parts, strict=False):
            if part is not None:
                group, p = held[job.at]
                take_part(Piece(group, p, job.shape, local(p.detach())[place.here], None), part, self._scratch)

    def _momentum(self, held: Sequence[Held]) -> list[Tensor]:
        """Advance the momenta, and return this rank's piece of the ``u`` of each parameter."""
        found: list[Tensor] = []
        for group, p in held:
            assert p.grad is not None
            g, m, mu = aligned(p.grad, p), local(self._state[p]["momentum_buffer"]), group["momentum"]
            # m := mu m + (1 - mu) g
            lists.lerp_([m], [g], 1 - mu)
            # u := (1 - mu) g + mu m
            found.append(torch.lerp(g, m, mu) if group["nesterov"] else m)
        return found

    def _moments(self, held: Sequence[Held], jobs: Sequence[_Job]) -> list[Any]:
        """NorMuon's ``S`` of each matrix, a vector that every rank has, or None."""
        found: list[Tensor | None] = []
        for at, (group, p) in enumerate(held):
            shapes = [job.shape for job in jobs if job.at == at]
            if group["normalization"] == "neuron":
                found += [one[0] for one in second_moments(self._state[p], p, shapes)]
            else:
                found += [None] * len(shapes)
        return found

    def _orthogonal(
        self, held: Sequence[Held], jobs: Sequence[tuple[_Job, Any, Any]], method: str, num_iterations: int
    ) -> list[Tensor]:
        """``O`` of the matrices that this rank owns, in the shapes of their regions; moves their ``S`` on."""
        layouts = [job.unit.layout for job, *_ in jobs]
        blocks = [layout.blocks(u)[0][0] for layout, (_, u, _) in zip(layouts, jobs, strict=True) if layout is not None]
        settings: Any = {"method": method, "num_iterations": num_iterations, "dtype": self._dtype}
        found: list[Tensor] = []
        for (job, u, moment), layout, x in zip(
            jobs, layouts, orthogonalize(blocks, **settings) if jobs else (), strict=True
        ):
            group, p = held[job.at]
            x = x.unsqueeze(0)
            normalize_stack([Piece(group, p, job.shape, None, None if moment is None else moment.unsqueeze(0))], x)
            region = torch.empty(u.shape, dtype=x.dtype, device=x.device)
            assert layout is not None
            target = layout.targets(region)[0]
            target.copy_(x.reshape(target.shape))
            found.append(region)
        return found


def _lies_on(p: Tensor, mesh: DeviceMesh) -> bool:
    return isinstance(p, DTensor) and p.device_mesh == mesh


def _whole(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in tensor.shape)
