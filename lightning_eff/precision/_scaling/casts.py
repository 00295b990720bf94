"""Cast to float8 with one scale per tensor, row or block, by :mod:`lightning_eff.kernels.fp8_cast`.

That module defines the results, including tiny and non-finite values, for every device.
"""

from typing import Literal

import torch
from torch import Tensor

from lightning_eff.kernels.fp8_cast import BLOCK, By, Codes, Pair, Peak, cast

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
    peak: Peak | None = None,
) -> Pair:
    """Cast a matrix for the products in which it takes part.

    Args:
        x: (R, K), float32, bfloat16, float16 or float64.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scaling: "tensorwise"; "rowwise", with a scale per row of the result, so that the transposed matrix is cast again from
            ``x``; or "blockwise", with a scale per group of 128 along the contraction (also cast again), or per block of
            128 x 128 if ``square``.
        rows: whether to return (R, K).
        columns: whether to return the transposed matrix.
        square: blocks instead of groups.
        scale: float32, (). The tensorwise scale, if known; otherwise it follows from the amax of ``x``.
        peak: a tensorwise amax to scale by, see :class:`.fp8_cast.Peak`.
    """
    ways: dict[Scaling, By] = {
        "tensorwise": "tensor",
        "rowwise": "rows",
        "blockwise": "blocks" if square else "groups",
    }
    return cast(x, dtype, ways[scaling], rows=rows, columns=columns, scale=scale, peak=peak)
