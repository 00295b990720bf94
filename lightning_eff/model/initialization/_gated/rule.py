"""Attention to relative positions, and its mixture with attention to content (d'Ascoli et al. 2021)."""

import math

import torch
from torch import Tensor


def relative(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return ``r_ij = (dx, dy, dx^2 + dy^2)`` from patch i to patch j of a grid, row by row: (N, N, 3), N = height *
    width.
    """
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    dx, dy = ((at.flatten()[None, :] - at.flatten()[:, None]).float() for at in (x, y))
    return torch.stack([dx, dy, dx.square() + dy.square()], dim=-1)


def centres(heads: int) -> Tensor:
    """Return where the heads look first, in patches (dx, dy) from their own: a square grid around it, (heads, 2).

    If the number of heads is not a square, these are the central places of the next larger grid.
    """
    side = math.isqrt(heads - 1) + 1
    middle = (side - 1) / 2
    places = [(x - middle, y - middle) for y in range(side) for x in range(side)]
    nearest = sorted(range(len(places)), key=lambda i: (places[i][0] ** 2 + places[i][1] ** 2, i))[:heads]
    return torch.tensor([places[i] for i in sorted(nearest)])


def local_weights(heads: int, locality: float) -> Tensor:
    """Return ``v_h = -alpha (-2 D_x, -2 D_y, 1)`` for the centre D of head h, so that
    ``v_h . r = -alpha |d - D|^2 + const``.
    """
    at = centres(heads)
    return -locality * torch.cat([-2 * at, torch.ones(heads, 1)], dim=1)


def position_scores(weights: Tensor, height: int, width: int) -> Tensor:
    """Return ``v_h . r_ij``: (H, N, N), in float32 or higher."""
    v = weights if weights.dtype.itemsize >= 4 else weights.float()
    return torch.einsum("hk,ijk->hij", v, relative(height, width, v.device).to(v.dtype))


def mixed(content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
    """Return ``A_h = (1 - s(lambda_h)) content_h + s(lambda_h) position_h``, with s the sigmoid.

    The rows of both sum to 1, so those of A do too, and need no normalisation.

    Args:
        content: softmax of ``Q K^T``, (..., H, N, N), or its product with the values, (..., H, N, d).
        position: softmax of ``v^T r``, likewise.
        gate: lambda, (H,).
    """
    s = torch.sigmoid(gate)[:, None, None].to(content.dtype)
    return (1 - s) * content + s * position.to(content.dtype)
