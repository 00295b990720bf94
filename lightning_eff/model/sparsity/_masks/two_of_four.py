"""Masks that keep two of every four neighbouring elements: in rows, or in rows and columns of 4 x 4 tiles."""

from collections.abc import Mapping
from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff.model.sparsity._masks.finding import Weight

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_AT_ONCE = 1 << 15  # tiles that are scored together, with 90 numbers each


def of_rows(size: Tensor) -> Tensor:
    """A mask of the two largest of every aligned four along the last dimension; ties keep the first.

    Args:
        size: ``|w|``, (..., 4 k).
    """
    four = size.unflatten(-1, (-1, 4))
    a, b = four.unsqueeze(-1), four.unsqueeze(-2)
    before = torch.ones(4, 4, dtype=torch.bool, device=size.device).tril(-1)  # [i, j]: j comes before i
    ahead = (b > a) | ((b == a) & before)
    return (ahead.sum(-1) < 2).flatten(-2)


@cache
def patterns() -> Tensor:
    """The 90 matrices of 4 x 4 with two ones in each row and each column, (90, 16)."""
    rows = [tuple(float(i in pair) for i in range(4)) for pair in combinations(range(4), 2)]
    found = [four for four in product(rows, repeat=4) if all(sum(column) == 2 for column in zip(*four, strict=True))]
    return torch.tensor(found).flatten(1)


def of_tiles(size: Tensor) -> Tensor:
    """A mask of two elements in each row and column of each aligned 4 x 4 tile: the one of 90 that keeps the largest sum.

    The transposed mask fits the transposed matrix, so ``W`` and ``W^T`` are both 2:4 (Hu et al. 2024).

    Args:
        size: ``|w|``, (..., 4 m, 4 k).
    """
    apart = size.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4)).transpose(-3, -2)  # (..., m, k, 4, 4)
    every = patterns().to(size.device)
    wide = torch.promote_types(size.dtype, torch.float32)
    # argmax_M sum |W ⊙ M|
    best = [(part.to(wide) @ every.to(wide).T).argmax(-1) for part in apart.reshape(-1, 16).split(_AT_ONCE)]
    chosen = every.bool()[torch.cat(best)].view(apart.shape)
    return chosen.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def mask_of(w: Tensor, axes: tuple[int, ...], *, tiles: bool) -> Tensor:
    """The mask of a weight, in its shape.

    Args:
        w: the weight.
        axes: its dimensions in the order that puts outputs second to last, and inputs last.
        tiles: whether to mask by tiles instead of rows.
    """
    laid = w.detach().abs().permute(axes)
    made = of_tiles(laid) if tiles else of_rows(laid)
    mask = torch.empty_like(w, dtype=torch.bool)
    mask.permute(axes).copy_(made)
    return mask


def axes_of(owner: nn.Module, weight: Weight) -> tuple[int, ...] | None:
    """The dimensions of a weight with outputs second to last and inputs last; None if they are unknown."""
    ndim = len(weight.shape)
    if weight.stack:
        return None
    if isinstance(owner, _TRANSPOSED):  # (in, out, ...)
        return (*range(2, ndim), 1, 0)
    if ndim > 2:
        return None if isinstance(owner, nn.Bilinear) else (*range(2, ndim), 0, 1)
    ins = getattr(owner, "in_features", None)
    return (1, 0) if is_conv1d(owner) or (ins == weight.shape[0] != weight.shape[1]) else (0, 1)


def laid_out(
    module: nn.Module, weights: Mapping[str, Weight], *, tiles: bool
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The weights that can be 2:4, with the order of their dimensions, and why others are left alone.

    Args:
        module: the module.
        weights: the weights by name.
        tiles: whether outputs must be multiples of 4 as well. A stack of experts, whose input dimension is unknown, can only
            be masked by tiles.
    """
    found: dict[str, tuple[int, ...]] = {}
    left: dict[str, str] = {}
    for name, weight in weights.items():
        axes = axes_of(module.get_submodule(name.rpartition(".")[0]), weight)
        if axes is None and weight.stack and tiles:
            axes = (0, 1, 2)
        if axes is None:
            left[name] = f"its input dimension is unknown{'; tiles=True does not need it' if weight.stack else ''}"
            continue
        sides = [weight.shape[axis] for axis in (axes[-2:] if tiles else axes[-1:])]
        if any(side % 4 for side in sides):
            what = "outputs and inputs" if tiles else "inputs"
            left[name] = f"its {' and '.join(map(str, sides))} {what} are not multiples of 4"
        else:
            found[name] = axes
    return found, left
