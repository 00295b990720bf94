"""Gathers the state of all ranks into rank 0's host memory for a checkpoint."""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_BYTES = 64 * 2**20  # bytes on rank 0's device at once


def gather_on_first(mine: Any, device: torch.device) -> list[Any] | None:
    """Return the objects of all ranks on rank 0, and None on other ranks; collective.

    ``torch.distributed.gather_object`` would hold all objects on rank 0's device at once. With tensors as large as the
    parameters, this is one copy of the model per rank. This function sends them in pieces.

    Args:
        mine: this rank's object, with tensors in host memory.
        device: device for messages.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    world, first = dist.get_world_size(), dist.get_rank() == 0
    file = io.BytesIO()
    if not first:
        pickle.dump(mine, file, protocol=pickle.HIGHEST_PROTOCOL)
    data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8) if not first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], device=device)
    told = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(told, size)
    sizes: list[int] = torch.cat(told).tolist()
    whole = [torch.empty(n if first else 0, dtype=torch.uint8) for n in sizes]
    most = max(1, min(_MOST_BYTES // world, max(sizes)))
    piece = torch.zeros(most, dtype=torch.uint8, device=device)
    pieces = [torch.empty_like(piece) for _ in sizes] if first else None
    for start in range(0, max(sizes), most):
        part = data[start : start + most]
        piece[: part.numel()].copy_(part)
        dist.gather(piece, pieces, dst=0)
        for target, got in zip(whole, pieces or (), strict=False):
            room = target[start : start + most]
            room.copy_(got[: room.numel()])
    return [mine, *(_loaded(whole.pop(1)) for _ in range(1, world))] if first else None


def _loaded(data: Tensor) -> Any:
    return pickle.loads(data.numpy())  # pyright: ignore[reportArgumentType] - a buffer
