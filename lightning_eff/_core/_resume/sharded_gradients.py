"""Gradients of an open accumulation window in a module sharded by ``fully_shard`` or ``parallelize_module``.

With Lightning's ModelParallelStrategy, FSDP2 averages gradients in every backward pass, so they are shards of a mean.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_eff._core._run.processes import replica

_DATA = "data_parallel"  # Lightning's name of this mesh dimension


def collect(
    trainer: Trainer, module: LightningModule, gather: Callable[[Any], list[Any]]
) -> tuple[list[dict[str, Tensor]], list[str]] | None:
    """Return on rank 0 the full gradients of each replica, and the names of those that are means over all. Collective.

    The result is None if no parameter has a gradient, for example because the module prevents FSDP2's reduction.
    """
    mean, own = dict[str, Tensor](), dict[str, Tensor]()
    for name, p in module.named_parameters():
        if p.grad is not None:
            grad = p.grad.detach()
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            if not trainer.is_global_zero and _averaged(p):
                whole = whole.new_empty(0)
            (mean if _averaged(p) else own)[name] = whole.to("cpu", copy=True)
    if not mean and not own:
        return None
    index, number = replica(trainer)
    every: list[dict[str, Tensor]] = [{} for _ in range(number)]
    for at, grads in gather((index, own)):
        every[at] = grads
    return ([{**mean, **grads} for grads in every], [*mean]) if trainer.is_global_zero else ([], [])


@torch.no_grad()
def take_up(
    trainer: Trainer, module: LightningModule, replicas: Sequence[Mapping[str, Tensor]], averaged: Sequence[str]
) -> None:
    """Restore full gradients of the replicas, to which the next backward pass adds."""
    for name, p in module.named_parameters():
        parts = [grads[name] for grads in replicas if name in grads]
        if not parts or not p.requires_grad:
            continue
        if name in averaged:
            whole = parts[0]
        elif _averaged(p):
            whole = sum(parts[1:], parts[0]) / len(replicas)
        else:
            whole = replicas[replica(trainer)[0]].get(name)
        if whole is None:
            continue
        whole = whole.to(p.device, copy=True)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        else:
            p.grad = whole


def _averaged(p: Tensor) -> bool:
    """Return whether FSDP2 averages the gradients of ``p`` over the replicas."""
    return isinstance(p, DTensor) and _DATA in (p.device_mesh.mesh_dim_names or ())
