"""How many ways the processes are divided: sizes along the three axes, checked, and the device mesh of them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PIPELINE, DATA, TENSOR = AXES = ("pipeline_parallel", "data_parallel", "tensor_parallel")


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh (pipeline, data, tensor), whose product is the number of processes.

    Ranks next to one another are of one tensor-parallel group, which speaks most; then come the replicas, then the stages.
    """

    pipeline: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def model_parallel(self) -> bool:
        """A model is spread over several processes by its layers or by its tensors."""
        return self.pipeline * self.tensor > 1


def check_size(name: str, value: Any, *, who: str, auto: bool = False) -> None:
    """Raise unless ``value`` is a whole number of processes >= 1, or "auto" where that is allowed."""
    if auto and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        either = "'auto' or " if auto else ""
        raise ValueError(f"{who}({name}={value!r}): expected {either}a number of processes, an integer >= 1.")


_MESHES: dict[tuple[Layout, str], tuple[Any, DeviceMesh]] = {}


def resolve(data: int | Literal["auto"], tensor: int, pipeline: int, world: int, *, who: str) -> Layout:
    """The layout of ``world`` processes; ``data="auto"`` takes what the two other sizes leave.

    Raises:
        ValueError: if the sizes do not multiply to ``world``, with the arithmetic.
    """
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
            f" {world} processes (devices x num_nodes). Start {layout.world} processes, or take sizes that multiply to"
            f" {world}; data_parallel_size='auto' takes what the others leave."
        )
    return layout


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh of all processes, with the axes ``AXES``; collective.

    Runs of one layout in one process share it: its process groups have threads, and cannot be ended, because torch keeps
    plans for DTensors by meshes that are equal.
    """
    world, made = _MESHES.get((layout, device.type), (None, None))
    if made is None or world is not dist.group.WORLD:
        made = init_device_mesh(device.type, (layout.pipeline, layout.data, layout.tensor), mesh_dim_names=AXES)
        _MESHES[layout, device.type] = dist.group.WORLD, made
    return made


def group_over(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    """The processes that differ from this one in ``axes`` alone: those of (pipeline, tensor) hold one replica together.

    Collective over all processes.
    """
    order = sorted(range(len(AXES)), key=lambda axis: AXES[axis] in axes)
    size = math.prod(mesh.mesh.shape[AXES.index(axis)] for axis in axes)
    mine: dist.ProcessGroup | None = None
    for members in mesh.mesh.permute(order).reshape(-1, size).tolist():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    assert mine is not None
    return mine
