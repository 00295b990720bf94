"""Linear maps in shifted and squeezed FP8, which fits each tensor's own range (Cambier et al. 2020, arXiv:2001.05674)."""

from collections.abc import Collection
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_eff._core.search_space import SearchSpace, Survey
from lightning_eff.precision._formats.formats import E5M2
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import Arithmetic, LinearPrecision, by_rows

LOG2_MAX = 15.0
"""log2 of the largest |Y|: 2^15 is the largest power of two in E5M2."""

_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double()  # Y by code, of both signs
_FINITE = _CODES[:124]  # 0 .. 57344
_HALFWAY = (_FINITE[:-1] + _FINITE[1:]) / 2  # below code i + 1
_STARTS = (torch.arange(2**15, dtype=torch.int32) << 16).view(
    torch.float32
)  # by upper half, the least number; then NaN


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return _HALFWAY.to(device), _CODES.to(device)


class Squeezed(NamedTuple):
    """A tensor in S2FP8.

    Attributes:
        codes: uint8, the tensor's shape: Y in E5M2.
        levels: float32 (256,): the number X that each code stands for.
    """

    codes: Tensor
    levels: Tensor

    def float(self) -> Tensor:
        """X = sign(Y) (2^-β |Y|)^(1/α), float32."""
        return self.levels.index_select(0, self.codes.flatten().int()).view(self.codes.shape)


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """α and μ of a tensor, over its finite elements that are not zero.

    μ = mean log2|x|,  m = max log2|x|,  α = 15 / (m − μ),  β = −α μ

    Where all magnitudes are the same, or all are zero, α is 1, so that Y is ±1, and that magnitude is kept exactly.
    Where they are nearly the same, m − μ counts as 1e-9 at least, which is what float64 sums are good for.

    Args:
        x: float32, any shape.

    Returns:
        Two float64 tensors of no dimension, on ``x``'s device.
    """
    size = x.detach().abs()
    counted = (size > 0) & (size < torch.inf)
    mu = size.double().log2_().masked_fill_(~counted, 0.0).sum() / counted.sum().clamp(min=1)
    if x.numel() == 0:
        return torch.ones_like(mu), mu
    highest = torch.where(counted, size, 0.0).max().double()
    lowest = torch.where(counted, size, torch.inf).min()
    spread = highest > lowest
    m = torch.where(spread, highest.log2(), 0.0)
    alpha = torch.where(spread, LOG2_MAX / (m - mu).clamp(min=1e-9), 1.0)
    return alpha, torch.where(spread | (highest == 0), mu, highest.log2())


def squeeze(x: Tensor) -> Squeezed:
    """``x`` in S2FP8, with its own statistics. Float32, any shape."""
    return encode(x, *statistics(x))


def encode(x: Tensor, alpha: Tensor, mu: Tensor) -> Squeezed:
    """Y = 2^β sign(x) |x|^α, rounded to E5M2, to nearest and halfway to even.

    Y rises with |x|, so rounding it is the same as comparing |x| with the 123 magnitudes at which its code changes;
    these are computed in float64. Zero, infinity and NaN stay what they are, and beyond E5M2 is its largest number.

    Args:
        x: float32, any shape.
        alpha: α, float64, no dimension.
        mu: μ, likewise; β is −α μ.
    """
    halfway, codes = _tables(x.device)
    # |Y| = t where log2|x| = (log2 t − β) / α = log2(t) / α + μ
    at = torch.exp2(halfway.log2() / alpha + mu)
    # the smallest float32 that has the upper code; at t itself, as far as float64 tells, the even one is right
    odd = torch.arange(1, 124, device=x.device) % 2 == 1
    first = at.float()
    tie = (first - at).abs() <= 4e-15 * at
    below = torch.where(tie, odd, first < at)
    inf = torch.full_like(first, torch.inf)
    first = torch.where(below, first.nextafter(inf), first)  # above zero, whose code is 0
    x = x.detach().contiguous()
    code = _count_up_to(x.abs(), torch.cat([first, inf[:1]]))  # 124 is infinity
    code = code.masked_fill_(x.isnan(), 0x7F).add_((x.view(torch.int32) >> 24).bitwise_and_(0x80)).to(torch.uint8)
    levels = torch.copysign(torch.exp2(codes.abs().log2() / alpha + mu), codes)
    levels = torch.where(codes.isfinite(), levels, codes)
    return Squeezed(code, levels.float())


def _count_up_to(size: Tensor, boundaries: Tensor) -> Tensor:
    """How many of the rising ``boundaries`` are <= each element of ``size``, >= 0 and float32; int32.

    On a CPU a binary search by elements is slow. Where no two boundaries lie within numbers that share their upper 16 bits,
    the count for the least of these numbers, and one comparison, give it.
    """
    if size.device.type == "cpu" and size.numel() > 4 * len(_STARTS):
        count = torch.bucketize(_STARTS, boundaries, out_int32=True, right=True)
        if bool((count.diff() <= 1).all()):
            count = count.index_select(0, (size.view(torch.int32) >> 16).flatten()).view(size.shape)
            padded = torch.cat([boundaries, boundaries.new_full((1,), torch.nan)])  # none is left to be reached
            return count.add_(padded.index_select(0, count.flatten()).view(size.shape) <= size)
    return torch.bucketize(size, boundaries, out_int32=True, right=True)


class _S2FP8Linear(torch.autograd.Function):
    """``y = x̂ Ŵᵀ + b``, and backward ``dx = ĝ Ŵ``, ``dW = ĝᵀ x̂``, ``db = Σ g``; a hat stands for what S2FP8 keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        a, w = squeeze(x.float()), squeeze(weight.float())
        # levels as integers: what compresses saved floating-point tensors must leave them alone
        ctx.save_for_backward(a.codes, a.levels.view(torch.int32), w.codes, w.levels.view(torch.int32))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y = a.float() @ w.float().t()
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- one result, one gradient
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_codes, x_levels, w_codes, w_levels = ctx.saved_tensors
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            g = g.float()
            g_hat = squeeze(g).float()
            if ctx.needs_input_grad[0]:
                w = Squeezed(w_codes, w_levels.view(torch.float32)).float()
                dx = (g_hat @ w).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                a = Squeezed(x_codes, x_levels.view(torch.float32)).float()
                dw = (g_hat.t() @ a).to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                db = g.sum(0).to(ctx.dtypes[2])
        return dx, dw, db


class S2FP8Precision(LinearPrecision):
    """Run linear maps on operands in S2FP8, an 8-bit format whose exponent range is fitted to each tensor.

    ``Trainer(plugins=[S2FP8Precision()])``. Inputs, weights and gradients of the three products of a map, ``x Wᵀ``,
    ``g W`` and ``gᵀ x``, are shifted and squeezed, so that the mean of ``log2|Y|`` is 0 and its maximum 15, and rounded
    to E5M2; products are summed in float32, without loss scaling. Weights are kept and updated as in the base plugin.

    No hardware has this format: it is emulated, to the bit, and slower than the base plugin. What is saved is memory:
    between forward and backward a map holds one byte for each element of its input and of its weight.

    As the format has it, a tensor with a few numbers far below the rest loses these to zero: magnitudes below
    ``2^(μ − 17 (m − μ) / 15)``.

    Args:
        base: the precision of all else: "32-true", "64-true", "16-true", "bf16-true" or "bf16-mixed", or a Precision
            plugin. Float64 operands are rounded to float32 first.
        skip: linear maps that stay as they are: "head" for those outside the blocks, and dotted paths.

    Raises:
        ValueError: at setup, if no linear map is left.
        TypeError: if an argument is of another type.
    """

    saves: ClassVar[str] = "activation memory of linear maps, 1 byte an element; no time: emulated"
    paper: ClassVar[str] = "Cambier et al. 2020, arXiv:2001.05674"
    constraints: ClassVar[str] = "emulated, slower than its base: for study"
    survey: ClassVar[Survey | None] = Survey("FP8 training", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        pointless=lambda profile: "an emulation, for study: slower than its base"
    )

    def __init__(self, base: str | Precision = "32-true", *, skip: Collection[str] = ("head",)) -> None:
        super().__init__(base, skip=skip)

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        return by_rows(_S2FP8Linear.apply)

    @override
    def describe(self) -> str:
        return f"S2FP8 ({E5M2.name} shifted and squeezed by tensor, emulated; sums in float32)"
