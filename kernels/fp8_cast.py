"""float32, bfloat16 or float16 to float8 with scales from amax, and the transposed copy that a backward pass needs.

A matrix ``x`` becomes codes ``q`` and inverse scales, with ``max`` the largest number of the format, 448 in E4M3 and 57344
in E5M2 (Micikevicius et al. 2022, arXiv:2209.05433):

    s = max / amax(x),    q = round_to_nearest_even(clamp(x s, -max, max)),    x ~ q / s.

Scales are computed in float32, and so is ``x s``. An amax below 2^-100, zero among them, counts as 2^-100, so that scales
and their inverses are ordinary numbers. Where amax is not finite the scale is 0 or NaN and its inverse infinite or NaN, so
that every product with it is NaN: an overflow stays visible.

What one read of ``x`` can give depends on what amax is taken over:

    groups, 1 x 128      a tile of 128 x 128 holds whole groups of x and of its transpose: both in one read
    blocks, 128 x 128    likewise; the transposed codes are the same ones
    rows                 one read if a row fits in registers (K <= 16384) and the transpose is not asked for; its scales are
                         those of columns, which no program holds, so that both together take two reads
    tensor               two reads; one where the scale, or an amax to scale by (``peak``), is known beforehand, and the
                         amax of now is taken in passing

Sizes that are no multiples of 16 cost a copy more, with zeros beside it.

torchao (0.18) computes these casts by torch operations that torch.compile fuses, with Triton kernels for blocks in its
prototypes; NVIDIA's Transformer Engine has them in CUDA, with transposes. Under torch.compile ours are torch operations
too, for the compiler to fuse. The kernels are for eager mode, where each torch operation is a pass over memory, and wait
for no compiler; torchao or Transformer Engine are better where a model is theirs throughout.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_eff.kernels import _launch

By = Literal["tensor", "rows", "groups", "blocks"]

BLOCK = 128
MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST = 2.0**-100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Codes(NamedTuple):
    """A matrix in float8, its contraction last.

    Attributes:
        codes: float8, (R, K), contiguous.
        inverse: float32, what the codes are multiplied by: () for all, (R, 1) for rows, (R, ceil(K / 128)) for groups,
            (ceil(R / 128), ceil(K / 128)) for blocks.
    """

    codes: Tensor
    inverse: Tensor

    @property
    def by_row(self) -> Tensor:
        """The inverse scales of each row, (R, 1) or (R, ceil(K / 128)); () where there is one."""
        rows = self.codes.shape[0]
        if self.inverse.ndim == 0 or self.inverse.shape[0] == rows:
            return self.inverse
        return self.inverse.repeat_interleave(BLOCK, 0)[:rows]

    def dequantized(self) -> Tensor:
        """The numbers that the codes stand for, float32, (R, K)."""
        inverse = self.by_row
        if inverse.ndim < 2 or inverse.shape[1] == 1:
            return self.codes.float() * inverse
        return self.codes.float() * inverse.repeat_interleave(BLOCK, 1)[:, : self.codes.shape[1]]


class Pair(NamedTuple):
    """A matrix (R, K) in float8 as its products need it: by rows, and transposed.

    Attributes:
        rows: of (R, K), or None if it was not asked for.
        columns: of the transposed matrix (K, R), or None.
        scale: float32, (): what the matrix was multiplied by, where it has one scale; else None.
        amax: float32, (): of the matrix, where it has one scale that was not given; else None.
    """

    rows: Codes | None
    columns: Codes | None
    scale: Tensor | None = None
    amax: Tensor | None = None


def cast(
    x: Tensor,
    dtype: torch.dtype,
    by: By,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: Tensor | None = None,
    peak: Tensor | None = None,
) -> Pair:
    """Cast a matrix (see the module's docstring).

    Every way computes the same bits, but for the sign of NaN.

    Args:
        x: (R, K), of any strides; float32, bfloat16 or float16, and what is neither is converted to float32 first.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        by: what has a scale of its own: "tensor"; "rows" of what is cast, so that the transposed matrix is cast anew, from
            ``x``; "groups" of 128 along the last dimension of what is cast (likewise); "blocks" of 128 x 128. The last
            group or block of a dimension may be shorter.
        rows: give (R, K).
        columns: give the transposed matrix, (K, R).
        scale: float32, (); by "tensor": the scale, if it is known. Larger numbers saturate.
        peak: float32, (); by "tensor": an amax to scale by, negative for none, which is looked at on the device. Larger
            numbers saturate; where the matrix has one that is not finite, the scale and its inverse are NaN (and codes
            are anything).

    Raises:
        TypeError: ``dtype`` is no float8 of these.
        ValueError: ``x`` is no matrix or empty, ``by`` is none of these, or ``scale`` and ``peak`` do not fit.
        ImportError: ``x`` on CUDA and triton not installed.
    """
    if dtype not in MAX:
        raise TypeError(f"cast({dtype=}): expected torch.float8_e4m3fn or torch.float8_e5m2.")
    if by not in get_args(By):
        raise ValueError(f"cast({by=}): expected one of {', '.join(get_args(By))}.")
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(f"cast(x of shape {tuple(x.shape)}): expected a matrix that is not empty, which has no amax.")
    if (scale is not None or peak is not None) and (by != "tensor" or (scale is not None and peak is not None)):
        raise ValueError(f"cast({by=}, scale or peak): expected at most one of them, and by='tensor'.")
    x = x.detach()
    if x.dtype not in DTYPES:
        x = x.float()
    if not _launch.uses_triton(x) or torch.compiler.is_compiling():
        return reference_cast(x, dtype, by, rows=rows, columns=columns, scale=scale, peak=peak)
    way = _launch.triton_module("fp8_cast")
    if x.is_contiguous() or not x.t().is_contiguous():
        return way.cast(x.contiguous(), dtype, by, rows, columns, scale, peak)
    pair = way.cast(x.t(), dtype, by, columns, rows, scale, peak)  # what is stored by columns is cast as its transpose
    return pair._replace(rows=pair.columns, columns=pair.rows)


def amax_of(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """``max |x|`` in float32, over all or over ``dim``, which stays with size 1; NaN if there is one."""
    return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None).float()


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """``max / amax`` in float32, the shape of ``amax``; see above for what is tiny or not finite."""
    # torch takes a number divided by a tensor as a product with the reciprocal, which rounds twice
    return torch.full((), MAX[dtype], device=amax.device) / amax.clamp_min(SMALLEST)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to nearest, ties to even, in float8; what is beyond the largest number becomes it, NaN stays NaN."""
    return x.clamp(-MAX[dtype], MAX[dtype]).to(dtype)


def reference_cast(
    x: Tensor,
    dtype: torch.dtype,
    by: By,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: Tensor | None = None,
    peak: Tensor | None = None,
) -> Pair:
    """What :func:`cast` computes, by torch operations; it is also the way of a CPU and under torch.compile."""
    x = x.float()
    if by == "tensor":
        amax = None
        if scale is None:
            amax = amax_of(x)
            # s = max / peak; NaN where something is not finite
            scale = scale_of(amax if peak is None else torch.where(peak < 0, amax, peak), dtype)
            if peak is not None:
                scale = torch.where(amax.isfinite(), scale, torch.nan)
        codes, inverse = saturated(x * scale, dtype), scale.reciprocal()
        return Pair(*_both(codes, inverse, inverse, rows, columns), scale, amax)
    if by == "blocks":
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (R / 128, 128, K / 128, 128)
        scales = scale_of(amax_of(blocks, (1, 3)), dtype)
        codes = saturated(blocks * scales, dtype).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
        inverse = scales[:, 0, :, 0].reciprocal()
        return Pair(*_both(codes, inverse, inverse.t(), rows, columns))
    way = _by_rows if by == "rows" else _by_groups
    return Pair(way(x, dtype) if rows else None, way(x.t(), dtype) if columns else None)


def _both(
    codes: Tensor, inverse: Tensor, turned: Tensor, rows: bool, columns: bool
) -> tuple[Codes | None, Codes | None]:
    return (
        Codes(codes.contiguous(), inverse) if rows else None,
        Codes(codes.t().contiguous(), turned.contiguous()) if columns else None,
    )


def _by_rows(x: Tensor, dtype: torch.dtype) -> Codes:
    scale = scale_of(amax_of(x, 1), dtype)
    return Codes(saturated(x * scale, dtype).contiguous(), scale.reciprocal())


def _by_groups(x: Tensor, dtype: torch.dtype) -> Codes:
    """A scale for each 1 x 128 of ``x``; the last group of a row may be shorter."""
    length = x.shape[1]
    groups = torch.nn.functional.pad(x, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = scale_of(amax_of(groups, 2), dtype)
    codes = saturated(groups * scale, dtype).flatten(1)[:, :length]
    return Codes(codes.contiguous(), scale.squeeze(2).reciprocal())
