"""Casts from float32, bfloat16 or float16 to float8 with scales from amax, with the transpose for a backward pass.

A matrix ``x`` becomes codes ``q`` and inverse scales. ``max`` is the largest number of the format, 448 in E4M3 and 57344 in
E5M2 (Micikevicius et al. 2022, arXiv:2209.05433):

    s = max / amax(x),    q = round_to_nearest_even(clamp(x s, -max, max)),    x ~ q / s.

Scales and ``x s`` are computed in float32. An amax below 2^-100, including zero, counts as 2^-100, so that scales and their
inverses are normal numbers. If amax is not finite, the scale is 0 or NaN and its inverse infinite or NaN. Every product with
it is then NaN, so an overflow stays visible.

The number of reads of ``x`` depends on the unit of amax:

    groups, 1 x 128      One read. A tile of 128 x 128 has whole groups of x and of its transpose.

    blocks, 128 x 128    One read. The transpose has the same codes.

    rows                 One read if a row fits in registers (K <= 16384) and only rows are needed. The transpose has scales
                         of columns, so both together take two reads.

    tensor               Two reads. One read if the scale, or an amax to scale by (``peak``), is known before. The same
                         kernel then also computes the present amax and records it, so that delayed scaling
                         (Micikevicius et al. 2022) launches one kernel per cast.

Sizes that are not multiples of 16 need an additional copy, padded with zeros.

torchao (0.18) computes these casts with torch operations that torch.compile fuses, and has prototypes of Triton kernels for
blocks. NVIDIA's Transformer Engine has CUDA kernels with transposes. Under torch.compile this module uses torch operations
too. Its kernels are for eager mode, where each torch operation reads and writes memory. If your whole model uses torchao or
Transformer Engine, use their casts.
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
    """A float8 matrix. Its last dimension is the contraction.

    Attributes:
        codes: float8, (R, K), contiguous.
        inverse: inverse scales, float32. The shape is () for one scale, (R, 1) for rows, (R, ceil(K / 128)) for groups, and
            (ceil(R / 128), ceil(K / 128)) for blocks. Scales of groups are stored by columns, so that the scales that a
            product needs at once are neighbours.
    """

    codes: Tensor
    inverse: Tensor

    @property
    def by_row(self) -> Tensor:
        """Return the inverse scales of each row, (R, 1) or (R, ceil(K / 128)), or () for a single scale."""
        rows = self.codes.shape[0]
        if self.inverse.ndim == 0 or self.inverse.shape[0] == rows:
            return self.inverse
        return self.inverse.repeat_interleave(BLOCK, 0)[:rows]

    def dequantized(self) -> Tensor:
        """Return the decoded numbers, float32, (R, K)."""
        inverse = self.by_row
        if inverse.ndim < 2 or inverse.shape[1] == 1:
            return self.codes.float() * inverse
        return self.codes.float() * inverse.repeat_interleave(BLOCK, 1)[:, : self.codes.shape[1]]


class Peak(NamedTuple):
    """An amax to scale by that is known before the cast, from a history.

    Attributes:
        value: float32, (), negative if it is not known. The device reads it.
        known: whether the host knows that ``value`` is not negative. The kernel then needs no pass for the present amax.
        scratch: two zeros, int32, (2,), for the kernel, which leaves zeros. Casts that can run at the same time need their own.
            None allocates them.
        record: where to record the amax of several matrices, float32, (n + 1,), or None. Each becomes the maximum of itself
            and the amax, unless the amax is not finite. The last one is for the matrix that is cast.
        others: the amax of the n matrices before, at most two, float32, ().
    """

    value: Tensor
    known: bool = False
    scratch: Tensor | None = None
    record: Tensor | None = None
    others: tuple[Tensor, ...] = ()


class Pair(NamedTuple):
    """A matrix (R, K) in float8 and its transpose, for products over either dimension.

    Attributes:
        rows: codes of the matrix (R, K), or None.
        columns: codes of the transpose (K, R), or None.
        scale: the scale of the whole matrix, float32, (), or None.
        amax: the amax of the whole matrix, float32, (), or None if the scale was given.
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
    peak: Tensor | Peak | None = None,
) -> Pair:
    """Cast a matrix (see the module's docstring).

    All implementations compute the same bits, except for the sign of NaN. With ``by="rows"`` or ``"groups"`` the transpose is
    cast from ``x`` with its own scales. The last group or block of a dimension can be shorter. Numbers too large for a given
    ``scale`` or ``peak`` saturate.

    Args:
        x: (R, K), with any strides. Types other than float32, bfloat16 and float16 are converted to float32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        by: the unit with one scale: "tensor", "rows", "groups" of 1 x 128, or "blocks" of 128 x 128.
        rows: return (R, K).
        columns: return the transpose, (K, R).
        scale: the known scale for "tensor", float32, ().
        peak: an amax to scale by for "tensor", a :class:`Peak` or its ``value``. If the matrix has a number that is not
            finite, the scale and its inverse are NaN, and the codes are undefined.

    Raises:
        TypeError: if ``dtype`` is not one of these.
        ValueError: if ``x`` is not a matrix or is empty, ``by`` is unknown, or ``scale`` and ``peak`` do not fit, or more than
            two ``peak.others``.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    if dtype not in MAX:
        raise TypeError(f"cast({dtype=}): expected torch.float8_e4m3fn or torch.float8_e5m2.")
    if by not in get_args(By):
        raise ValueError(f"cast({by=}): expected one of {', '.join(get_args(By))}.")
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(f"cast(x of shape {tuple(x.shape)}): expected a matrix that is not empty.")
    if (scale is not None or peak is not None) and (by != "tensor" or (scale is not None and peak is not None)):
        raise ValueError(f"cast({by=}, scale or peak): expected at most one of them, and by='tensor'.")
    if isinstance(peak, Peak):
        others, places = len(peak.others), 0 if peak.record is None else peak.record.numel()
        if others > 2 or places not in (0, others + 1):
            raise ValueError(
                f"cast(peak with {others} others and {places} places to record): expected at most two others, and one place"
                " more than others."
            )
    elif peak is not None:
        peak = Peak(peak)
    x = x.detach()
    if x.dtype not in DTYPES:
        x = x.float()
    if not _launch.uses_triton(x) or torch.compiler.is_compiling():
        return reference_cast(x, dtype, by, rows=rows, columns=columns, scale=scale, peak=peak)
    way = _launch.triton_module("fp8_cast")
    if x.is_contiguous() or not x.t().is_contiguous():
        return way.cast(x.contiguous(), dtype, by, rows, columns, scale, peak)
    pair = way.cast(x.t(), dtype, by, columns, rows, scale, peak)  # a matrix stored by columns is cast as its transpose
    return pair._replace(rows=pair.columns, columns=pair.rows)


def amax_of(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return ``max |x|`` in float32, over all dimensions or over ``dim`` (kept with size 1); NaN if ``x`` has one."""
    return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None).float()


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``max / amax`` in float32; the module's docstring explains tiny and infinite values."""
    # torch divides a number by a tensor by multiplying with the reciprocal, which rounds twice
    return torch.full((), MAX[dtype], device=amax.device) / amax.clamp_min(SMALLEST)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``x`` to nearest even in float8; larger numbers become the largest one, and NaN stays NaN."""
    return x.clamp(-MAX[dtype], MAX[dtype]).to(dtype)


def reference_cast(
    x: Tensor,
    dtype: torch.dtype,
    by: By,
    *,
    rows: bool = True,
    columns: bool = False,
    scale: Tensor | None = None,
    peak: Tensor | Peak | None = None,
) -> Pair:
    """Reference for :func:`cast` in torch operations, also used on a CPU and under torch.compile."""
    x = x.float()
    if by == "tensor":
        amax = None
        if scale is None:
            amax = amax_of(x)
            # s = max / peak; NaN if a number is not finite
            peak = peak if peak is None or isinstance(peak, Peak) else Peak(peak)
            scale = scale_of(amax if peak is None else torch.where(peak.value < 0, amax, peak.value), dtype)
            if peak is not None:
                scale = torch.where(amax.isfinite(), scale, torch.nan)
                if peak.record is not None:
                    found = torch.stack([*peak.others, amax])
                    peak.record.copy_(torch.where(found.isfinite(), torch.maximum(peak.record, found), peak.record))
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
    """Cast with one scale per 1 x 128 of ``x``; the last group of a row can be shorter."""
    length = x.shape[1]
    groups = torch.nn.functional.pad(x, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = scale_of(amax_of(groups, 2), dtype)
    codes = saturated(groups * scale, dtype).flatten(1)[:, :length]
    return Codes(codes.contiguous(), scale.squeeze(2).reciprocal().t().contiguous().t())
