"""Casts to float8 with one scale for a tensor, a row, or a block: which of :mod:`lightning_eff.kernels.fp8_cast` serves.

What they compute, what is tiny and what is not finite, that module says; it is the one definition, on every device.
"""

from typing import Literal

import torch
from torch import Tensor

from lightning_eff.kernels.fp8_cast import BLOCK, By, Codes, Pair, cast

__all__ = ["BLOCK", "Codes", "Pair", "Scaling", "cast_pair"]

Scaling = Literal["tensorwise", "rowwise", "blockwise"]


def cast_pair(
    x: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    rows: bool = True,
    columns: bool = False,
    square: bool = False,
    scale: Tensor | None = None,
    peak: Tensor | None = None,
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
        peak: float32, (); tensorwise: an amax to scale by, negative for the amax of ``x``.
    """
    ways: dict[Scaling, By] = {
        "tensorwise": "tensor",
        "rowwise": "rows",
        "blockwise": "blocks" if square else "groups",
    }
    return cast(x, dtype, ways[scaling], rows=rows, columns=columns, scale=scale, peak=peak)
