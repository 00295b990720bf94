"""Folds tensors into pieces with one side per dimension, and multiplies the sides of stacked pieces."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_eff.optim.optimizers._matrices import Layout


@dataclass(frozen=True)
class Fold:
    """Folds the tensor of one parameter into pieces with one side per dimension.

    Attributes:
        layout: matrices in the tensor; None uses the tensor unchanged.
        merge: largest product up to which a convolution's kernel is merged into its inputs; otherwise it is a separate side.
        block: largest side of a piece; None means no limit.
    """

    layout: Layout | None
    merge: int
    block: int | None = None

    def apart(self, tensor: Tensor) -> list[Tensor]:
        """Return the pieces, which are views of ``tensor`` if it is contiguous."""
        if self.layout is None:
            pieces = [tensor]
        elif self.layout.form == "convolution":
            pieces = [tensor.reshape(merged(tuple(tensor.shape), self.merge))]
        else:
            pieces = self.layout.apart(tensor)
        if self.block is None:
            return pieces
        for dim in range(pieces[0].ndim):
            pieces = [part for piece in pieces for part in piece.split(self.block, dim)]
        return pieces


def merged(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Merge (out, in, h, w, ...) to (out, in * h * w ...) if the product is at most ``limit``.

    Otherwise merge it to (out, in, h * w ...). Kernel sides with a larger product are not merged.
    """
    found: list[int] = []
    for size in reversed(shape[1:]):
        if found and found[0] * size <= limit:
            found[0] *= size
        else:
            found.insert(0, size)
    return (shape[0], *found)


def unfolded(stack: Tensor, dim: int) -> Tensor:
    """Return pieces (n, d_0, d_1, ...) as matrices (n, d_dim, product of the rest)."""
    return stack.movedim(dim + 1, 1).flatten(2) if stack.ndim > 2 else stack.unsqueeze(-1)


def multiplied(stack: Tensor, matrices: Mapping[int, Tensor], *, transposed: bool = False) -> Tensor:
    """Multiply each side of each piece by its matrix: for two sides ``A^T X B``, or ``A X B^T`` if ``transposed``.

    Args:
        stack: pieces ``X``, (n, d_0, d_1, ...).
        matrices: matrices (n, d, d) by side.
        transposed: see above.
    """
    for dim, matrix in matrices.items():
        last = stack.movedim(dim + 1, -1)
        flat = last.reshape(last.shape[0], -1, last.shape[-1])
        done = torch.bmm(flat, matrix.mT if transposed else matrix)
        stack = done.view(last.shape).movedim(-1, dim + 1)
    return stack


def outer(stack: Tensor, sides: Iterable[int]) -> dict[int, Tensor]:
    """Return ``X X^T`` for each of ``sides``, summed over the others: (n, d, d) for pieces (n, d_0, d_1, ...)."""
    found: dict[int, Tensor] = {}
    for dim in sides:
        x = unfolded(stack, dim)
        found[dim] = torch.bmm(x, x.mT)
    return found


def together(pieces: list[Tensor]) -> Tensor:
    """Return pieces of one shape as one tensor: a copy, or a view if there is one piece."""
    return pieces[0].unsqueeze(0) if len(pieces) == 1 else torch.stack(pieces)


def weight(piece: Tensor) -> int:
    """Return the bytes of a piece and of one matrix for each of its sides."""
    return (piece.numel() + sum(side * side for side in piece.shape)) * working(piece.dtype).itemsize


def working(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for products and roots."""
    return torch.promote_types(dtype, torch.float32)


def cost(shape: Sequence[int]) -> int:
    """Return about the multiplications for a piece: products of all sides, and decompositions now and then."""
    return sum(prod(shape) * side + side**3 for side in shape)


def sides(shape: tuple[int, ...], max_dim: int | None = None) -> list[int]:
    """Return the sides of a piece that have a matrix: those longer than one and at most ``max_dim``."""
    return [dim for dim, size in enumerate(shape) if size > 1 and (max_dim is None or size <= max_dim)]
