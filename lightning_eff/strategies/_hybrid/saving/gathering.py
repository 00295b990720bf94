"""Gathers whole tensors from their pieces, one at a time, on rank 0 for a file or on every rank for the module."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_eff.strategies._hybrid.layout import PIPELINE
from lightning_eff.strategies._hybrid.shards import whole_of

if TYPE_CHECKING:
    from lightning_eff.strategies._hybrid.saving.plain import Plain

_COPIED_BYTES = 4 * 2**30  # largest weights of which every process gets a copy


@dataclass(frozen=True)
class Described:
    """The whole shape and dtype of a tensor, for ranks that do not hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Described":
        return cls(tuple(tensor.shape), tensor.dtype)


def owners(
    plain: "Plain", saved: list[str] | None, stages: dist.ProcessGroup | None
) -> tuple[set[str], dict[str, int]]:
    """Return the names of this rank's tensors, and the first stage that holds each tensor; collective over ``stages``.

    Args:
        plain: the record of the plain module.
        saved: in a pipeline, the keys of ``state_dict`` that this rank saves.
        stages: the ranks of a pipeline, or None.
    """
    held = plain.held()
    if stages is None:
        return held, dict.fromkeys(held, 0)
    told: list[Any] = [None] * stages.size()
    dist.all_gather_object(told, (sorted(held), saved), group=stages)
    owner = {name: stage for stage in reversed(range(len(told))) for name in told[stage][0]}
    buffers = {name for name, slot in plain.slots.items() if not slot.is_parameter}
    for stage, (theirs, saves) in enumerate(told):  # the last stage saves buffers outside the blocks
        mine = buffers.intersection(theirs)
        owner.update({name: stage for key in saves if (name := plain.keys[key]) in mine})
    return held, owner


def wanted_of(
    plain: "Plain", held: set[str], owner: Mapping[str, int], *, buffers: bool
) -> dict[str, tuple[Tensor | None, Described]]:
    """Return the tensors that :meth:`Gathering.weights` gathers after a run: parameters, and ``buffers`` if requested."""
    current = plain.current()
    return {
        name: (current[name] if name in held else None, Described(tuple(slot.shape), slot.dtype))
        for name, slot in plain.slots.items()
        if name in owner and (slot.is_parameter or buffers)
    }


class Gathering:
    """Gathers one module's tensors over the ranks of a mesh.

    Args:
        mesh: a mesh with the axes of :mod:`.layout`.
        owner: returns the first stage that holds a tensor, by name.
        device: device for messages.
    """

    def __init__(self, mesh: DeviceMesh, owner: Callable[[str], int], device: torch.device) -> None:
        self.mesh, self.owner, self.device = mesh, owner, device
        self.stage = mesh.get_local_rank(PIPELINE)
        self.stages = mesh[PIPELINE].get_group()
        self.coordinates = {axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names or () if axis != PIPELINE}

    @property
    def _first_of_stage(self) -> bool:
        return not any(self.coordinates.values())

    def owned(self, name: str) -> bool:
        """Whether this rank's stage is the first that holds ``name``."""
        return self.owner(name) == self.stage

    def on_first(self, name: str, held: Tensor | None, what: Described) -> Tensor | None:
        """Return the whole tensor in host memory on rank 0, and None elsewhere; owners pass it as ``held``. Collective."""
        owner = self.owner(name)
        whole = None
        if owner == self.stage:
            assert held is not None, f"stage {owner} owns {name} and does not hold it"
            whole = whole_of(held).contiguous()
        if not self._first_of_stage:
            return None
        if owner == 0:
            return whole.cpu() if self.stage == 0 and whole is not None else None
        if self.stage == owner:
            assert whole is not None
            dist.send(whole.to(self.device), 0)
        elif self.stage == 0:
            got = torch.empty(what.shape, dtype=what.dtype, device=self.device)
            dist.recv(got, int(self.mesh.mesh[owner].flatten()[0]))
            return got.cpu()
        return None

    def on_all(self, name: str, held: Tensor | None, what: Described) -> Tensor:
        """Return the whole tensor in host memory on every rank; collective."""
        owner = self.owner(name)
        if owner == self.stage:
            assert held is not None, f"stage {owner} owns {name} and does not hold it"
            whole = whole_of(held).contiguous().clone()
        else:
            whole = torch.empty(what.shape, dtype=what.dtype, device=self.device)
        if self.stages.size() > 1:
            whole = whole.to(self.device)
            dist.broadcast(whole, group=self.stages, group_src=owner)
        return whole.cpu()

    def weights(
        self, wanted: Mapping[str, tuple[Tensor | None, Described]], *, everywhere: bool, who: str
    ) -> dict[str, Tensor]:
        """Return whole tensors in host memory on every rank, or only on rank 0 if they are large; collective.

        Args:
            wanted: for each name, this rank's part and the description of the tensor.
            everywhere: return them on every rank in any case.
            who: name of the caller in messages.
        """
        size = sum(math.prod(what.shape) * what.dtype.itemsize for _, what in wanted.values())
        everywhere = everywhere or size <= _COPIED_BYTES
        if not everywhere:
            rank_zero_info(
                f"{who}(gather_after_fit='auto'): only rank 0 has the whole weights now ({size / 2**30:.1f} GiB)."
                " Set gather_after_fit=True for a copy in every process."
            )
        take = self.on_all if everywhere else self.on_first
        found = {name: take(name, held, what) for name, (held, what) in wanted.items()}
        return {name: whole for name, whole in found.items() if whole is not None}

    def merged(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Return the union of every stage's mapping on every rank, for small values only; collective."""
        if self.stages.size() == 1:
            return dict(mine)
        parts: list[Any] = [None] * self.stages.size()
        dist.all_gather_object(parts, dict(mine), group=self.stages)
        return {key: value for part in parts for key, value in part.items()}
