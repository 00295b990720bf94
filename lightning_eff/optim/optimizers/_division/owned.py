"""The state of matrices that lives with the rank that owns them, and its form in checkpoints.

In a run, the state of a DTensor has its ``step``, the ``owners`` of its matrices, and on the owner of matrix ``u`` the tensors
``"u/<key>"``. In checkpoints it has the keys of a whole parameter, which do not depend on the layout. Tensors of the
parameter's shape are divided like it, and square factors over all ranks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_eff.optim.optimizers._division.messages import Messages, Place, merged
from lightning_eff.optim.optimizers._division.shards import Spread, Unit, local, shape_of, whole_region

OWNERS = "owners"
_FACTOR = re.compile(r"(\w+)_(\d+)_(\d+)")  # the factor of a side of a piece, such as covariance_3_0

State = dict[str, Any]


@dataclass(frozen=True)
class Matrices:
    """The matrices of one DTensor.

    Attributes:
        p: the parameter.
        units: its matrices.
        counts: the number of pieces of each, which have factors of their own.
    """

    p: DTensor
    units: Sequence[Unit]
    counts: Sequence[int]

    def first(self, u: int) -> int:
        """The number of the first piece of matrix ``u`` in the parameter."""
        return sum(self.counts[:u])

    def places(self, owners: Sequence[int]) -> list[Place]:
        """Return the place of each matrix in the parameter."""
        spread = Spread.of(self.p)
        return [Place(spread, unit.region, owner) for unit, owner in zip(self.units, owners, strict=True)]

    def of_piece(self, number: int) -> tuple[int, int]:
        """Return the matrix of a piece of the parameter, and the piece's number in it."""
        for u, count in enumerate(self.counts):
            if number < count:
                return u, number
            number -= count
        raise ValueError(f"there is no piece {number}")


def settled(state: Mapping[str, Any]) -> bool:
    """Whether a state is with the owners, and not as a checkpoint or a new parameter has it."""
    return OWNERS in state


def of_unit(state: Mapping[str, Any], u: int) -> State:
    """Return the tensors of matrix ``u`` on its owner."""
    start = f"{u}/"
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}


def put_unit(state: State, u: int, own: Mapping[str, Any]) -> None:
    """Store the tensors of matrix ``u``."""
    state.update({f"{u}/{key}": value for key, value in own.items() if isinstance(value, Tensor)})


def settle(messages: Messages, held: Sequence[tuple[Matrices, State, Sequence[int]]]) -> None:
    """Move states that a checkpoint has loaded to the owners of their matrices; collective over the mesh.

    Args:
        messages: exchanges the pieces.
        held: parameters of one mesh, with their states and the owner of each matrix. The states are changed in place.
    """
    places: list[Place] = []
    pieces: list[Tensor] = []
    into: list[tuple[State, str]] = []
    for matrices, state, owners in held:
        for key in [key for key, value in state.items() if isinstance(value, Tensor) and key != "step"]:
            value = state.pop(key)
            mesh = matrices.p.device_mesh
            spread = Spread.of(value) if isinstance(value, DTensor) else Spread.copied(value.shape, mesh)
            factor = _FACTOR.fullmatch(key)
            wanted = [(u, unit.region, key) for u, unit in enumerate(matrices.units)]
            if factor is not None:
                u, number = matrices.of_piece(int(factor[2]))
                wanted = [(u, whole_region(value.shape), f"{factor[1]}_{number}_{factor[3]}")]
            for u, region, name in wanted:
                places.append(Place(spread, region, owners[u]))
                pieces.append(local(value))
                into.append((state, f"{u}/{name}"))
        state[OWNERS] = tuple(owners)
    for (state, key), value in zip(into, messages.gather(places, pieces), strict=True):
        if value is not None:
            state[key] = value.clone(memory_format=torch.contiguous_format)


def shown(messages: Messages, held: Sequence[tuple[Matrices, State]]) -> list[State]:
    """Return the states in the form of checkpoints; collective over the mesh.

    Args:
        messages: exchanges the pieces.
        held: parameters of one mesh with their states. States that are not settled stay unchanged.
    """
    mine: dict[Any, Any] = {}
    for i, (matrices, state) in enumerate(held):
        for u in range(len(matrices.units)) if settled(state) else ():
            for key, value in of_unit(state, u).items():
                mine[i, u, key] = tuple(value.shape), value.dtype
    found: list[State] = []
    targets: list[dict[str, tuple[Spread, Tensor]]] = []
    for _, state in held:
        plain = {k: v for k, v in state.items() if k != OWNERS and "/" not in k}
        found.append(plain if settled(state) else dict(state))
        targets.append({})
    if not held:
        return found
    mesh, device = held[0][0].p.device_mesh, local(held[0][0].p).device
    places: list[Place] = []
    wholes: list[Tensor | None] = []
    into: list[Tensor] = []
    for (i, u, key), (shape, dtype) in sorted(merged(mesh, mine).items(), key=lambda one: one[0]):
        matrices, state = held[i]
        name, spread, region = _target(matrices, mesh, u, key, shape)
        place = Place(spread, region, state[OWNERS][u])
        if name not in targets[i]:
            targets[i][name] = spread, torch.zeros(shape_of(spread.here), dtype=dtype, device=device)
        places.append(place)
        wholes.append(state.get(f"{u}/{key}"))
        into.append(targets[i][name][1])
    parts = messages.scatter(places, wholes, [one.dtype for one in into], device)
    for place, part, target in zip(places, parts, into, strict=True):
        if part is not None:
            target[place.here].copy_(part)
    for state, entries in zip(found, targets, strict=True):
        state.update({name: spread.wrap(tensor) for name, (spread, tensor) in entries.items()})
    return found


def _target(
    matrices: Matrices, mesh: DeviceMesh, u: int, key: str, shape: tuple[int, ...]
) -> tuple[str, Spread, tuple[tuple[int, int], ...]]:
    """Return the name of an entry in checkpoints, how it is spread, and the region that matrix ``u`` fills."""
    factor = _FACTOR.fullmatch(key)
    if factor is None:
        return key, Spread.of(matrices.p), matrices.units[u].region
    name = f"{factor[1]}_{int(factor[2]) + matrices.first(u)}_{factor[3]}"
    return name, Spread(shape, mesh, (Shard(0),) * mesh.ndim), whole_region(shape)
