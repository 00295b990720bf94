"""The sizes of the mesh of processes along its three axes, their checks, and the device mesh."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PIPELINE, DATA, TENSOR = AXES = ("pipeline_parallel", "data_parallel", "tensor_parallel")
REPLICAS, SHARDS = "data_parallel_replicas", "data_parallel_shards"  # replace DATA if both are larger than one


@dataclass(frozen=True)
class Layout:
    """The sizes of the mesh (pipeline, data, tensor), whose product is the number of processes.

    Neighboring ranks form a tensor-parallel group, which communicates most. Then follow the ranks that share one copy of the
    parameters, the copies, and the stages.

    Attributes:
        data: number of ranks that average gradients: the data-parallel ranks, times ``context``.
        copies: number of groups of these ranks with hybrid sharding, in which each group shares one copy of the parameters.
            Otherwise 1.
        context: number of neighboring ranks among them that share their sequences.
    """

    pipeline: int
    data: int
    tensor: int
    copies: int = 1
    context: int = 1

    def __str__(self) -> str:
        among = f" ({self.copies} copies of {self.data // self.copies} shards)" if self.copies > 1 else ""
        shared = f" x context {self.context}" if self.context > 1 else ""
        return f"pipeline {self.pipeline} x data {self.samples}{among}{shared} x tensor {self.tensor}"

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def samples(self) -> int:
        """The number of replicas, over which samples are divided."""
        return self.data // self.context

    @property
    def shares_samples(self) -> bool:
        """Whether several processes train on the same samples."""
        return self.model_parallel or self.context > 1

    @property
    def model_parallel(self) -> bool:
        """Whether several processes hold one model, divided by layers or tensors."""
        return self.pipeline * self.tensor > 1


def check_shard(shard: bool | int, data: Any, *, who: str) -> None:
    """Raise ``ValueError`` if a numeric ``shard`` does not divide the data-parallel ranks, if their number is known."""
    if not isinstance(shard, bool) and isinstance(data, int) and data % shard:
        raise ValueError(
            f"{who}(shard={shard}): groups of {shard} ranks do not divide the {data} data-parallel ranks. Set shard to one of"
            f" {[k for k in range(2, data + 1) if data % k == 0]}, True or False."
        )


@dataclass(frozen=True)
class _Made:
    """A mesh, and this rank's groups: those that average gradients, those with other samples, and those that share them."""

    world: Any
    mesh: DeviceMesh
    data: dist.ProcessGroup
    samples: dist.ProcessGroup
    context: dist.ProcessGroup | None


_MESHES: dict[tuple[Layout, str], _Made] = {}


def resolve(
    data: int | Literal["auto"],
    tensor: int,
    pipeline: int,
    world: int,
    *,
    context: int = 1,
    shard: bool | int = True,
    who: str,
) -> Layout:
    """Return the layout of ``world`` processes.

    Args:
        data: data-parallel size; "auto" uses the processes that the other sizes leave.
        tensor: tensor-parallel size.
        pipeline: number of pipeline ranks.
        world: number of processes.
        context: number of processes that share a sequence.
        shard: number of ranks that share one copy of the parameters; True means all, False none.
        who: name of the caller in messages.

    Raises:
        ValueError: if the sizes do not multiply to ``world``, or ``shard`` does not divide the data-parallel size.
    """
    layout = _sizes(data, tensor, pipeline, context, world, who=who)
    check_shard(shard, layout.data, who=who)
    return layout if isinstance(shard, bool) else replace(layout, copies=layout.data // shard)


def _sizes(data: int | Literal["auto"], tensor: int, pipeline: int, context: int, world: int, *, who: str) -> Layout:
    asked, sizes = f"tensor_parallel_size={tensor}, pipeline_parallel_size={pipeline}", [tensor, pipeline]
    if context > 1:
        asked, sizes = f"{asked}, context_parallel_size={context}", [*sizes, context]
    product, written = math.prod(sizes), " x ".join(map(str, sizes))
    if data == "auto":
        if world % product:
            raise ValueError(
                f"{who}({asked}): {written} = {product} does not divide the {world} processes"
                f" (devices x num_nodes). Start {product} processes or a multiple of that, or change the sizes."
            )
        return Layout(pipeline, world // (tensor * pipeline), tensor, context=context)
    layout = Layout(pipeline, data * context, tensor, context=context)
    if layout.world != world:
        raise ValueError(
            f"{who}(data_parallel_size={data}, {asked}): {data} x {written} = {layout.world}, but there are"
            f" {world} processes (devices x num_nodes). Start {layout.world} processes, or use sizes that multiply to"
            f" {world}, for example with data_parallel_size='auto'."
        )
    return layout


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all processes with the axes ``AXES``; copies replace ``DATA`` by two axes. Collective.

    Runs with the same layout in one process share the mesh. Its process groups have threads and cannot be ended, because
    torch caches plans for DTensors by equal meshes.
    """
    known = _MESHES.get((layout, device.type))
    if known is None or known.world is not dist.group.WORLD:
        divided = {REPLICAS: layout.copies, SHARDS: layout.data // layout.copies}
        data = divided if layout.copies > 1 else {DATA: layout.data}
        sizes = {PIPELINE: layout.pipeline, **data, TENSOR: layout.tensor}
        made = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        group = made[DATA].get_group() if layout.copies == 1 else group_over(made, DATA)
        samples, context = (group, None) if layout.context == 1 else _shared(layout, made)
        known = _MESHES[layout, device.type] = _Made(dist.group.WORLD, made, group, samples, context)
    return known.mesh


def _shared(layout: Layout, mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of ranks with other samples, and of those that share them; collective."""
    ranks = mesh.mesh.reshape(layout.pipeline, layout.samples, layout.context, layout.tensor)
    samples = _group_of(ranks.movedim(1, -1).reshape(-1, layout.samples))
    return samples, _group_of(ranks.movedim(2, -1).reshape(-1, layout.context))


def _group_of(rows: torch.Tensor) -> dist.ProcessGroup:
    """Create a group of each row of ranks, and return this rank's; collective over all processes."""
    mine: dist.ProcessGroup | None = None
    for members in rows.tolist():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    assert mine is not None
    return mine


def data_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes of the mesh whose ranks average gradients."""
    return tuple(name for name in mesh.mesh_dim_names or () if name not in (PIPELINE, TENSOR))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of this rank's data-parallel ranks for ``fully_shard``."""
    return mesh[data_axes(mesh)]


def _made(mesh: DeviceMesh) -> _Made:
    return next(made for made in _MESHES.values() if made.mesh is mesh)


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that average gradients with this one, for a mesh from :func:`make_mesh`."""
    return _made(mesh).data


def samples_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of this rank and those with other samples, one for each replica."""
    return _made(mesh).samples


def context_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that share sequences with this one, with context parallelism."""
    group = _made(mesh).context
    assert group is not None
    return group


def group_over(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    """Return the processes that differ from this one only in ``axes``. Over (pipeline, tensor) they hold one replica.

    ``DATA`` means all axes that average gradients. Collective over all processes.
    """
    names = mesh.mesh_dim_names or ()
    axes = tuple(name for axis in axes for name in (data_axes(mesh) if axis == DATA else (axis,)))
    order = sorted(range(len(names)), key=lambda axis: names[axis] in axes)
    size = math.prod(mesh.mesh.shape[names.index(axis)] for axis in axes)
    return _group_of(mesh.mesh.permute(order).reshape(-1, size))
