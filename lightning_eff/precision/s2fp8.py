"""Linear layers in shifted and squeezed FP8, fitted to each tensor's range (Cambier et al. 2020, arXiv:2001.05674)."""

from functools import cache
from typing import ClassVar, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core.search_space import SearchSpace
from lightning_eff.precision._formats.formats import E5M2
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import LinearPrecision, Skip
from lightning_eff.precision._linear.products import Arithmetic, Products, linear_in

LOG2_MAX = 15.0
"""log2 of the largest |Y|: 2^15 is the largest power of two in E5M2."""

_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double()  # Y by code, of both signs
_FINITE = _CODES[:124]  # 0 .. 57344
_HALFWAY = (_FINITE[:-1] + _FINITE[1:]) / 2  # below code i + 1
_STARTS = (torch.arange(2**15, dtype=torch.int32) << 16).view(
    torch.float32
)  # the smallest number by upper half; then NaN


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
    """Return α and μ of a tensor, over its finite nonzero elements.

    μ = mean log2|x|,  m = max log2|x|,  α = 15 / (m − μ),  β = −α μ

    If all magnitudes are equal, or all are zero, α is 1. Y is then ±1, and the magnitude is stored exactly. If they are almost
    equal, m − μ counts as at least 1e-9, the accuracy of float64 sums.

    Args:
        x: float32, any shape.

    Returns:
        Two 0-dimensional float64 tensors on ``x``'s device.
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
    """Encode ``x`` (float32, any shape) in S2FP8 with its own statistics."""
    return encode(x, *statistics(x))


def encode(x: Tensor, alpha: Tensor, mu: Tensor) -> Squeezed:
    """Round Y = 2^β sign(x) |x|^α to E5M2, to nearest with ties to even.

    Y grows with |x|, so rounding it is the same as comparing |x| with the 123 magnitudes at which its code changes. These are
    computed in float64. Zero, infinity and NaN stay unchanged, and values beyond the range of E5M2 become its largest number.

    Args:
        x: float32, any shape.
        alpha: α, float64, 0-dimensional.
        mu: μ, likewise; β is −α μ.
    """
    halfway, codes = _tables(x.device)
    # |Y| = t where log2|x| = (log2 t − β) / α = log2(t) / α + μ
    at = torch.exp2(halfway.log2() / alpha + mu)
    # the smallest float32 with the upper code; a tie, to float64 accuracy, goes to the even code
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
    """Count the sorted ``boundaries`` that are <= each element of ``size`` (float32, >= 0); return int32.

    An elementwise binary search is slow on a CPU. If no two boundaries lie between numbers with the same upper 16 bits, the
    count for the smallest of these numbers plus one comparison gives the result.
    """
    if size.device.type == "cpu" and size.numel() > 4 * len(_STARTS):
        count = torch.bucketize(_STARTS, boundaries, out_int32=True, right=True)
        if bool((count.diff() <= 1).all()):
            count = count.index_select(0, (size.view(torch.int32) >> 16).flatten()).view(size.shape)
            padded = torch.cat([boundaries, boundaries.new_full((1,), torch.nan)])  # no further boundary
            return count.add_(padded.index_select(0, count.flatten()).view(size.shape) <= size)
    return torch.bucketize(size, boundaries, out_int32=True, right=True)


class _S2FP8(Products):
    """``y = x̂ Ŵᵀ``, ``dx = ĝ Ŵ`` and ``dW = ĝᵀ x̂``; a hat marks values in S2FP8."""

    @override
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        a, w = squeeze(x), squeeze(weight)
        # levels as integers, so that activation compression leaves them alone
        saved = a.codes, a.levels.view(torch.int32), w.codes, w.levels.view(torch.int32)
        return a.float() @ w.float().t(), saved

    @override
    def backward(
        self, saved: tuple[Tensor, ...], g: Tensor, *, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        x_codes, x_levels, w_codes, w_levels = saved
        g_hat = squeeze(g).float()
        dx = dw = None
        if needs_x:
            dx = g_hat @ Squeezed(w_codes, w_levels.view(torch.float32)).float()
        if needs_weight:
            dw = g_hat.t() @ Squeezed(x_codes, x_levels.view(torch.float32)).float()
        return dx, dw


class S2FP8Precision(LinearPrecision):
    """Emulate linear layers in S2FP8, an 8-bit format that fits its exponent range to each tensor.

    The inputs, weights and gradients of a layer's three products, ``x Wᵀ``, ``g W`` and ``gᵀ x``, are shifted and squeezed so
    that the mean of ``log2|Y|`` is 0 and its maximum 15, and then rounded to E5M2. Products are summed in float32, without loss
    scaling. The base plugin stores and updates the weights.

    Use it to study the format. No hardware has it, so it is emulated bit by bit and slower than the base plugin. It does save
    memory: between forward and backward, a layer stores one byte per element of its input and weight.

    In a tensor with a few very small numbers, the format flushes magnitudes below ``2^(μ − 17 (m − μ) / 15)`` to zero.

    Args:
        base: the plugin for everything else. "32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", or a plugin.
            Float64 operands are rounded to float32 first.
        skip: the layers to leave unchanged. "head" is the layers outside the blocks; other entries are dotted paths.

    Raises:
        ValueError: at setup, if no linear layer remains.
        TypeError: if ``base`` has the wrong type.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, plugins=[S2FP8Precision()])

    References:
        Cambier et al. 2020, "Shifted and Squeezed 8-bit Floating Point Format for Low-Precision Training of Deep Neural
        Networks", arXiv:2001.05674.
    """

    saves: ClassVar[str] = (
        "activation memory of linear layers (1 byte per element), but no time, because it is emulated"
    )
    paper: ClassVar[str] = "Cambier et al. 2020, arXiv:2001.05674"
    constraints: ClassVar[str] = "for study: emulated, and slower than its base"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        pointless=lambda profile: "it is emulated for study, and slower than its base"
    )

    @declared
    def __init__(self, base: str | Precision = "32-true", *, skip: Skip = ("head",)) -> None:
        super().__init__(base, skip=skip)

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        return linear_in(_S2FP8())

    @override
    def describe(self) -> str:
        return f"S2FP8 ({E5M2.name} shifted and squeezed by tensor, emulated; sums in float32)"
