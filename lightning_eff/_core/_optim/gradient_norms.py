"""Gradient norms of a whole model, which may be sharded over several processes."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_TERMS = 2**22  # of one inner product, which is summed in float32 on some devices
_SMALL = 2**12  # elements of a tensor for which one operation on the host costs more than copying it
_EXACT = (torch.float32, torch.float64)  # dtypes in which products are summed as they are


def gradient_square(strategy: Strategy, pairs: Sequence[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
    """Return the sum of squares over gradients, shape (), float64, the same on all processes of a model. Collective.

    Args:
        strategy: the run's strategy.
        pairs: this process's parameters, each with its gradient, or a tensor in the same layout.
    """
    own = getattr(strategy, "gradient_norm", None)
    if own is not None:
        return own(pairs).double() ** 2
    whole, pieces = list[Tensor](), dict[DeviceMesh, list[Tensor]]()
    for _, gradient in pairs:
        if isinstance(gradient, DTensor):
            pieces.setdefault(gradient.device_mesh, []).append(gradient.detach())
        elif gradient is not None:
            whole.append(gradient)
    squares = [square_of(whole)] if whole else []
    for found in pieces.values():
        total = torch.nn.utils.get_total_norm(found)
        squares.append((total.full_tensor() if isinstance(total, DTensor) else total).double() ** 2)
    return torch.stack(squares).sum()


def norm(gradient: Tensor) -> Tensor:
    """Return the norm, shape (), in float32 or higher precision."""
    values = _values(gradient)
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))


def _values(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def square_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares over tensors of one device, shape (), in float64. Norms are in float32 or higher precision."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        values = _values(gradient)
        alike.setdefault(values.dtype, []).append(values)
    norms = [
        torch.stack(torch._foreach_norm(found, 2, torch.promote_types(dtype, torch.float32))).double()  # pyright: ignore[reportPrivateImportUsage]
        for dtype, found in alike.items()
    ]
    return torch.cat(norms).square().sum()


@torch.no_grad()
def square_and_product(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of the first tensors, and their inner product with the second ones.

    Both have the shape () and are in float64, from float32 or higher precision. At most 4 MiB are allocated for each dtype,
    unless a tensor is sparse or not contiguous.

    Args:
        pairs: whole tensors of one device, of one shape in each pair; None counts as zero. At least one pair.
    """
    squares, products, others = list[Tensor](), list[Tensor](), list[Tensor]()
    for a, b in _joined(pairs):
        # on other devices, fewer and larger kernels are faster
        if a.is_cpu and a.dtype in _EXACT and a.layout == torch.strided:
            squares += _products(a, a)
        else:
            others.append(a)
        if b is not None:
            products += _products(a, b)
    totals = [torch.stack(found).double().sum() for found in (squares, products) if found]
    of_others = [square_of(others)] if others else []
    square = torch.stack([*totals[: bool(squares)], *of_others]).sum()
    return square, totals[-1] if products else torch.zeros_like(square)


def _joined(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the pairs, with those of small tensors on the CPU joined, at most 64 in one."""
    rest, alike = list[tuple[Tensor, Tensor | None]](), dict[torch.dtype, list[tuple[Tensor, Tensor]]]()
    for a, b in pairs:
        joins = a.numel() <= _SMALL and a.is_cpu and a.dtype in _EXACT and a.layout == torch.strided
        if joins and b is not None and b.dtype == a.dtype and b.layout == torch.strided:
            alike.setdefault(a.dtype, []).append((a, b))
        else:
            rest.append((a, b))
    for found in alike.values():
        for first in range(0, len(found), 64):
            xs, ys = zip(*found[first : first + 64], strict=True)
            rest.append((torch.cat([x.flatten() for x in xs]), torch.cat([y.flatten() for y in ys])))
    return rest


def _products(a: Tensor, b: Tensor) -> list[Tensor]:
    if a.is_sparse or b.is_sparse:
        both = b + a if a.is_sparse else a + b  # torch adds a sparse tensor to a dense one only in this order
        return [(square_of([both]) - square_of([a]) - square_of([b])) / 2]
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    x = a.reshape(-1)
    y = x if b is a else b.reshape(-1)
    if a.dtype == b.dtype and a.dtype in _EXACT and a.numel() <= _TERMS:
        return [x.dot(y)]
    dtype = torch.promote_types(a.dtype, torch.float32)
    return [u.to(dtype).dot(v.to(dtype)) for u, v in zip(x.split(_TERMS), y.split(_TERMS), strict=True)]
