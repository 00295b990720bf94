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
        copies: number of groups of data-parallel ranks with hybrid sharding, in which each group shares one copy of the
            parameters. Otherwise 1.
    """

    pipeline: int
    data: int
    tensor: int
    copies: int = 1

    def __str__(self) -> str:
        among = f" ({self.copies} copies of {self.data // self.copies} shards)" if self.copies > 1 else ""
        return f"pipeline {self.pipeline} x data {self.data}{among} x tensor {self.tensor}"

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

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


_MESHES: dict[tuple[Layout, str], tuple[Any, DeviceMesh, dist.ProcessGroup]] = {}


def resolve(
    data: int | Literal["auto"], tensor: int, pipeline: int, world: int, *, shard: bool | int = True, who: str
) -> Layout:
    """Return the layout of ``world`` processes.

    Args:
        data: data-parallel size; "auto" uses the processes that the other sizes leave.
        tensor: tensor-parallel size.
        pipeline: number of pipeline ranks.
        world: number of processes.
        shard: number of ranks that share one copy of the parameters; True means all, False none.
        who: name of the caller in messages.

    Raises:
        ValueError: if the sizes do not multiply to ``world``, or ``shard`` does not divide the data-parallel size.
    """
    layout = _sizes(data, tensor, pipeline, world, who=who)
    check_shard(shard, layout.data, who=who)
    return layout if isinstance(shard, bool) else replace(layout, copies=layout.data // shard)


def _sizes(data: int | Literal["auto"], tensor: int, pipeline: int, world: int, *, who: str) -> Layout:
    asked = f"tensor_parallel_size={tensor}, pipeline_parallel_size={pipeline}"
    if data == "auto":
        if world % (tensor * pipeline):
            raise ValueError(
                f"{who}({asked}): {tensor} x {pipeline} = {tensor * pipeline} does not divide the {world} processes"
                f" (devices x num_nodes). Start {tensor * pipeline} processes or a multiple of that, or change the sizes."
            )
        return Layout(pipeline, world // (tensor * pipeline), tensor)
    layout = Layout(pipeline, data, tensor)
    if layout.world != world:
        raise ValueError(
            f"{who}(data_parallel_size={data}, {asked}): {data} x {tensor} x {pipeline} = {layout.world}, but there are"
            f" {world} processes (devices x num_nodes). Start {layout.world} processes, or use sizes that multiply to"
            f" {world}, for example with data_parallel_size='auto'."
        )
    return layout


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all processes with the axes ``AXES``; copies replace ``DATA`` by two axes. Collective.

    Runs with the same layout in one process share the mesh. Its process groups have threads and cannot be ended, because
    torch caches plans for DTensors by equal meshes.
    """
    world, made, _ = _MESHES.get((layout, device.type), (None, None, None))
    if made is None or world is not dist.group.WORLD:
        divided = {REPLICAS: layout.copies, SHARDS: layout.data // layout.copies}
        data = divided if layout.copies > 1 else {DATA: layout.data}
        sizes = {PIPELINE: layout.pipeline, **data, TENSOR: layout.tensor}
        made = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        group = made[DATA].get_group() if layout.copies == 1 else group_over(made, DATA)
        _MESHES[layout, device.type] = dist.group.WORLD, made, group
    return made


def data_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes of the mesh that divide samples."""
    return tuple(name for name in mesh.mesh_dim_names or () if name not in (PIPELINE, TENSOR))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of this rank's data-parallel ranks for ``fully_shard``."""
    return mesh[data_axes(mesh)]


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of this rank's data-parallel ranks, for a mesh from :func:`make_mesh`."""
    return next(data for _, made, data in _MESHES.values() if made is mesh)


def group_over(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    """Return the processes that differ from this one only in ``axes``. Over (pipeline, tensor) they hold one replica.

    ``DATA`` means all axes that divide samples. Collective over all processes.
    """
    names = mesh.mesh_dim_names or ()
    axes = tuple(name for axis in axes for name in (data_axes(mesh) if axis == DATA else (axis,)))
    order = sorted(range(len(names)), key=lambda axis: names[axis] in axes)
    size = math.prod(mesh.mesh.shape[names.index(axis)] for axis in axes)
    mine: dist.ProcessGroup | None = None
    for members in mesh.mesh.permute(order).reshape(-1, size).tolist():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    assert mine is not None
    return mine
