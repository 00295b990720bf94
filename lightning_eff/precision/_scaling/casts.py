"""Casts to float8 with one scale for a tensor, a row, or a block.

A matrix ``x`` becomes codes ``q`` and inverse scales, with ``max`` the largest number of the format:

    s = max / amax(x),    q = round_to_nearest_even(clamp(x s, -max, max)),    x ~ q / s.

Scales are computed in float32, and so is ``x s``. An amax below 2^-100, zero among them, counts as 2^-100, so that scales
and their inverses are ordinary numbers. Where amax is not finite the scale is 0 or NaN and its inverse infinite or NaN, so
that every product with it is NaN: an overflow stays visible.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_eff.precision._formats.formats import E4M3, E5M2, cast_fp8

Scaling = Literal["tensorwise", "rowwise", "blockwise"]

BLOCK = 128
_SMALLEST = 2.0**-100
_MAX = {f.dtype: f.max_value for f in (E4M3, E5M2)}


class Codes(NamedTuple):
    """A matrix in float8, its contraction last.

    Attributes:
        codes: float8, (R, K), contiguous.
        inverse: float32, what the codes are multiplied by: () for all, (R, 1) for rows, (R, ceil(K / 128)) for blocks.
    """

    codes: Tensor
    inverse: Tensor

    def dequantized(self) -> Tensor:
        """The numbers that the codes stand for, float32, (R, K)."""
        if self.inverse.ndim < 2 or self.inverse.shape[1] == 1:
            return self.codes.float() * self.inverse
        return self.codes.float() * self.inverse.repeat_interleave(BLOCK, 1)[:, : self.codes.shape[1]]


class Pair(NamedTuple):
    """A matrix (R, K) in float8 as its products need it: by rows, and transposed.

    Attributes:
        rows: of (R, K), or None if it was not asked for.
        columns: of the transposed matrix (K, R), or None.
        scale: float32, (): what the matrix was multiplied by, for tensorwise scaling; else None.
    """

    rows: Codes | None
    columns: Codes | None
    scale: Tensor | None = None


def amax_of(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """``max |x|`` in float32, over all or over ``dim``, which stays with size 1; NaN if there is one."""
    return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None).float()


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """``max / amax`` in float32, the shape of ``amax``; see above for what is tiny or not finite."""
    # torch takes a number divided by a tensor as a product with the reciprocal, which rounds twice
    return torch.full((), _MAX[dtype], device=amax.device) / amax.clamp_min(_SMALLEST)


def cast_pair(
    x: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    rows: bool = True,
    columns: bool = False,
    square: bool = False,
    scale: Tensor | None = None,
) -> Pair:
    """Cast a matrix for the products in which it takes part.

    Args:
        x: (R, K), float32, bfloat16, float16 or float64.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scaling: "tensorwise"; "rowwise": a scale for each row of what is cast, so that the transposed matrix is cast
            anew, from ``x``; "blockwise": a scale for each group of 128 along the contraction (likewise cast anew), or for
            each block of 128 x 128 if ``square``.
        rows: give (R, K).
        columns: give the transposed matrix.
        square: blocks instead of groups.
        scale: float32, (); tensorwise: the scale, if it is known; else from the amax of ``x``.
    """
    x = x.float()
    if scaling == "tensorwise":
        scale = scale_of(amax_of(x), dtype) if scale is None else scale
        return _both(cast_fp8(x * scale, dtype), scale.reciprocal(), rows, columns, scale)
    if scaling == "blockwise" and square:
        padded, amax = _blocked(x)
        scales = scale_of(amax, dtype)
        codes = cast_fp8(padded * scales, dtype).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
        inverse = scales[:, 0, :, 0].reciprocal()
        return Pair(
            Codes(codes.contiguous(), _expanded(inverse, x.shape[0])) if rows else None,
            Codes(codes.t().contiguous(), _expanded(inverse.t(), x.shape[1])) if columns else None,
        )
    cast = _by_rows if scaling == "rowwise" else _by_groups
    return Pair(cast(x, dtype) if rows else None, cast(x.t(), dtype) if columns else None)


def _both(codes: Tensor, inverse: Tensor, rows: bool, columns: bool, scale: Tensor) -> Pair:
    return Pair(
        Codes(codes.contiguous(), inverse) if rows else None,
        Codes(codes.t().contiguous(), inverse) if columns else None,
        scale,
    )


def _by_rows(x: Tensor, dtype: torch.dtype) -> Codes:
    scale = scale_of(amax_of(x, 1), dtype)
    return Codes(cast_fp8(x * scale, dtype).contiguous(), scale.reciprocal())


def _by_groups(x: Tensor, dtype: torch.dtype) -> Codes:
    """A scale for each 1 x 128 of ``x``; the last group of a row may be shorter."""
    length = x.shape[1]
    groups = torch.nn.functional.pad(x, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = scale_of(amax_of(groups, 2), dtype)
    codes = cast_fp8(groups * scale, dtype).flatten(1)[:, :length]
    return Codes(codes.contiguous(), scale.squeeze(2).reciprocal())


def _blocked(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` padded to (R / 128, 128, K / 128, 128), and the amax of each block, (R / 128, 1, K / 128, 1)."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return blocks, amax_of(blocks, (1, 3))


def _expanded(inverse: Tensor, rows: int) -> Tensor:
    """Blocks' inverse scales for each row."""
    return inverse.repeat_interleave(BLOCK, 0)[:rows].contiguous()
