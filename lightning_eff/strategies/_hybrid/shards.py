"""Functions for tensors of the plain module that are divided over ranks: their local pieces and whole values."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchmetrics.utilities.distributed import gather_all_tensors

_MOST_BYTES = 250 * 2**20  # of gradients per message


def local(tensor: Tensor) -> Tensor:
    """Return the local piece of ``tensor``, or the tensor itself if it is a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def piece(whole: Tensor, like: Tensor) -> Tensor:
    """Return a view of the piece of ``whole``, a plain tensor, that this rank holds of ``like``."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's piece of ``whole`` into ``target``, a plain tensor or a DTensor."""
    local(target).copy_(piece(whole, target))


def shard_like(whole: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Return ``whole`` on ``device``, divided like ``like`` if the shapes are equal, else whole on every rank."""
    if not isinstance(like, DTensor) or whole.numel() == 1:
        return whole.to(device, copy=True)
    if whole.shape == like.shape:
        return wrap_like(piece(whole, like).to(device, copy=True), like)
    replicated = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(whole.to(device, copy=True), like.device_mesh, replicated, run_check=False)


def wrap_like(here: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the shape and placements of ``like`` and the local piece ``here``."""
    return DTensor.from_local(
        here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def empty_like(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in the shape and placements of ``like``."""
    if isinstance(like, DTensor):
        return wrap_like(torch.zeros(like.to_local().shape, dtype=dtype, device=device), like)
    return torch.zeros(like.shape, dtype=dtype, device=device)


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached; collective over the mesh of a DTensor."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def counted_here(tensor: Tensor, coordinates: Mapping[str, int]) -> bool:
    """Whether this rank's piece counts in a sum over all ranks; only the first of several equal copies does.

    Args:
        tensor: the parameter, or its gradient, with normalized placements.
        coordinates: this rank's index along each axis of the mesh that has copies or pieces.
    """
    sharded: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        sharded = {name for name, at in zip(names, tensor.placements, strict=True) if not at.is_replicate()}
    return all(rank == 0 or axis in sharded for axis, rank in coordinates.items())


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, most_bytes: int) -> None:
    """Copy the values of plain ``tensors`` from the group's first rank to all its ranks, in place; collective.

    Args:
        tensors: the tensors, in the same order on all ranks.
        group: the ranks.
        most_bytes: size of a message, unless a single tensor is larger.
    """
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        bucket = buckets.setdefault(t.dtype, [])
        if bucket and (sum(b.numel() for b in bucket) + t.numel()) * t.element_size() > most_bytes:
            _broadcast_bucket(bucket, group)
            bucket.clear()
        bucket.append(t)
    for bucket in buckets.values():
        _broadcast_bucket(bucket, group)


def _broadcast_bucket(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.broadcast(flat, group=group, group_src=0)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view(t.shape))


@torch.no_grad()
def all_reduce_gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup, *, mean: bool = False) -> None:
    """Sum or average gradients over ``group``; gradients that no rank has stay None. Collective.

    A message has gradients of one dtype, and then the number of ranks that have each gradient. Only a rank without a
    gradient reads these numbers and waits for the message.

    Args:
        params: the parameters, in the same order on all ranks.
        group: the ranks.
        mean: average instead of summing.
    """
    buckets: dict[torch.dtype, list[list[nn.Parameter]]] = {}
    room: dict[torch.dtype, int] = {}
    for p in params if group.size() > 1 else ():
        if p.requires_grad:
            size = local(p).nbytes
            if size > room.get(p.dtype, -1):
                buckets.setdefault(p.dtype, []).append([])
                room[p.dtype] = _MOST_BYTES
            buckets[p.dtype][-1].append(p)
            room[p.dtype] -= size
    for dtype, alike in buckets.items():
        for bucket in alike:
            _reduce_bucket(bucket, dtype, group, mean=mean)


def _reduce_bucket(params: list[nn.Parameter], dtype: torch.dtype, group: dist.ProcessGroup, *, mean: bool) -> None:
    here = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in params]
    has = torch.tensor([p.grad is not None for p in params], dtype=dtype, device=here[0].device)
    flat = torch.cat([*(grad.reshape(-1).to(dtype) for grad in here), has])
    if mean:
        flat[: -len(params)].div_(group.size())
    dist.all_reduce(flat, group=group)
    *parts, counts = flat.split([*(grad.numel() for grad in here), len(params)])
    anywhere = counts.tolist() if any(p.grad is None for p in params) else [1] * len(params)
    for p, part, count in zip(params, parts, anywhere, strict=True):
        if p.grad is None and count:
            p.grad = torch.zeros_like(p)
        if p.grad is not None:
            grad = local(p.grad)
            grad.copy_(part.view(grad.shape))


class _Gathered(torch.autograd.Function):
    """Stacks every rank's tensor. The gradient of each is summed over all ranks.

    torch's own function does not support a part of the processes with gloo.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(pieces, tensor, group=group)
        return torch.stack(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def all_gather(tensor: Tensor, group: ProcessGroup, *, sync_grads: bool) -> Tensor:
    """Stack ``tensor`` of every rank of ``group``, (ranks, ...), with gradients if ``sync_grads``; collective."""
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return cast("Tensor", _Gathered.apply(tensor, group))


def anywhere(here: bool, device: torch.device) -> bool:
    """Return whether ``here`` is true in any process; collective over all of them."""
    told = torch.tensor(int(here), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def everywhere(group: Any) -> bool:
    """Whether ``group`` means all processes."""
    return group is None or group is dist.group.WORLD


def over_replicas(group: ProcessGroup) -> Callable[..., list[Tensor]]:
    """Return torchmetrics' ``gather_all_tensors`` with ``group`` as the default instead of all processes."""

    def gather(result: Tensor, group_given: Any = None, **kwargs: Any) -> list[Tensor]:
        asked = kwargs.pop("group", group_given)
        return gather_all_tensors(result, group if everywhere(asked) else asked, **kwargs)

    return gather
