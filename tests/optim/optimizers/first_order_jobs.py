"""What two processes run for the tests of first-order optimizers: weights that are sharded, beside whole ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_eff import LAMB, LARS, ACClip, Adan, Lion

RULES: dict[str, Callable[..., Any]] = {
    "ACClip": lambda params: ACClip(params, lr=0.5, weight_decay=0.1),
    "Lion": lambda params: Lion(params, lr=0.01, weight_decay=0.1),
    "Adan": lambda params: Adan(params, lr=0.01, weight_decay=0.1),
    "LARS": lambda params: LARS(params, lr=0.5, weight_decay=0.1, trust=0.02),
    "LAMB": lambda params: LAMB(params, lr=0.02, weight_decay=0.1),
}
#: shapes with the dimension that is sharded; None is a replicated tensor, whose gradient is a pending sum over the ranks
SHAPES: list[tuple[tuple[int, ...], int | None]] = [((6, 4), 0), ((4, 6), 1), ((5, 3), 0), ((7,), 0), ((4, 4), None)]


def sharded() -> dict[str, float]:
    """The largest difference from whole tensors after four steps, by rule."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: _apart(make, mesh) for name, make in RULES.items()}


def _apart(make: Callable[..., Any], mesh: Any) -> float:
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape, _ in SHAPES]
    dims = [dim for _, dim in SHAPES]
    pieces = [nn.Parameter(_placed(p.detach(), dim, mesh)) for p, dim in zip(whole, dims, strict=True)]
    ours, theirs = make(pieces), make(whole)
    for _ in range(4):
        for p, piece, dim in zip(whole, pieces, dims, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            piece.grad = _placed(p.grad, dim, mesh)
            if dim is None:
                piece.grad = DTensor.from_local(p.grad / mesh.size(), mesh, [Partial()])
        ours.step()
        theirs.step()
    return max(float((_full(q) - p).abs().max()) for p, q in zip(whole, pieces, strict=True))


def _placed(tensor: Tensor, dim: int | None, mesh: Any) -> DTensor:
    return distribute_tensor(tensor.clone(), mesh, [Replicate() if dim is None else Shard(dim)])


def _full(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()
