"""Whole tensors from their pieces, one at a time: on rank 0 for a file, or on every rank for the module's own use."""

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

_COPIED_BYTES = 4 * 2**30  # of weights that every process may hold a copy of


@dataclass(frozen=True)
class Described:
    """What a rank must know of a tensor that it does not hold: its whole shape and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Described":
        return cls(tuple(tensor.shape), tensor.dtype)


def owners(
    plain: "Plain", saved: list[str] | None, stages: dist.ProcessGroup | None
) -> tuple[set[str], dict[str, int]]:
    """Which tensors are here, and which stage is the first that holds each; collective over ``stages``.

    Args:
        plain: the module as it was.
        saved: in a pipeline, the keys of ``state_dict`` that this rank saves.
        stages: the ranks of a pipeline; None without one.
    """
    held = plain.held()
    if stages is None:
        return held, dict.fromkeys(held, 0)
    told: list[Any] = [None] * stages.size()
    dist.all_gather_object(told, (sorted(held), saved), group=stages)
    owner = {name: stage for stage in reversed(range(len(told))) for name in told[stage][0]}
    buffers = {name for name, slot in plain.slots.items() if not slot.is_parameter}
    for stage, (theirs, saves) in enumerate(told):  # buffers outside the blocks are the last stage's to save
        mine = buffers.intersection(theirs)
        owner.update({name: stage for key in saves if (name := plain.keys[key]) in mine})
    return held, owner


def wanted_of(
    plain: "Plain", held: set[str], owner: Mapping[str, int], *, buffers: bool
) -> dict[str, tuple[Tensor | None, Described]]:
    """What :meth:`Gathering.weights` puts together at the end of a run: all parameters, and ``buffers`` if asked for."""
    current = plain.current()
    return {
        name: (current[name] if name in held else None, Described(tuple(slot.shape), slot.dtype))
        for name, slot in plain.slots.items()
        if name in owner and (slot.is_parameter or buffers)
    }


class Gathering:
    """The ranks of a mesh as holders of one module's tensors.

    Args:
        mesh: with the axes of :mod:`.layout`.
        owner: name -> the first stage that holds the tensor of that name.
        device: where messages are taken from.
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
        """The whole tensor in host memory on rank 0, None elsewhere; collective, with ``held`` where it is owned."""
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
        """The whole tensor in host memory on every rank; collective."""
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
        """Whole tensors in host memory: on every rank, or on rank 0 alone where they are large; collective.

        Args:
            wanted: name -> what this rank holds of it, and its description.
            everywhere: on every rank in any case.
        """
        size = sum(math.prod(what.shape) * what.dtype.itemsize for _, what in wanted.values())
        everywhere = everywhere or size <= _COPIED_BYTES
        if not everywhere:
            rank_zero_info(
                f"{who}(gather_after_fit='auto'): the weights, {size / 2**30:.1f} GiB, are whole on rank 0 alone now."
                " Take gather_after_fit=True for a copy in every process."
            )
        take = self.on_all if everywhere else self.on_first
        found = {name: take(name, held, what) for name, (held, what) in wanted.items()}
        return {name: whole for name, whole in found.items() if whole is not None}

    def merged(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """The union of every stage's mapping, on every rank; small things only; collective."""
        if self.stages.size() == 1:
            return dict(mine)
        parts: list[Any] = [None] * self.stages.size()
        dist.all_gather_object(parts, dict(mine), group=self.stages)
        return {key: value for part in parts for key, value in part.items()}
