"""Gradient norms of a whole model, which may be sharded over several processes."""

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def gradient_square(strategy: Strategy, pairs: Sequence[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
    """Return the sum of squares over gradients, shape (), float64, the same on all processes of a model. Collective.

    Args:
        strategy: the run's strategy.
        pairs: this process's parameters, each with its gradient, or a tensor in the same layout.
    """
    norm = getattr(strategy, "gradient_norm", None)
    if norm is not None:
        return norm(pairs).double() ** 2
    squares, pieces = list[Tensor](), dict[DeviceMesh, list[Tensor]]()
    for _, gradient in pairs:
        if isinstance(gradient, DTensor):
            pieces.setdefault(gradient.device_mesh, []).append(gradient.detach())
        elif gradient is not None:
            squares.append(square(gradient))
    for found in pieces.values():
        whole = torch.nn.utils.get_total_norm(found)
        squares.append((whole.full_tensor() if isinstance(whole, DTensor) else whole).double() ** 2)
    return total(squares)


def square(gradient: Tensor) -> Tensor:
    """Return the sum of squares, shape (), in float32 or higher precision."""
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)) ** 2


def total(squares: Iterable[Tensor]) -> Tensor:
    """Return the sum, shape (), in float64."""
    return torch.stack([s.double() for s in squares]).sum()
