"""Linear layers in INT8 in both passes, with stochastically rounded gradients (DoReFa, arXiv:1606.06160)."""

from collections.abc import Callable
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import LinearPrecision, Skip
from lightning_eff.precision._linear.products import Arithmetic, Products, linear_in

LARGEST = 127
"""Integers range from -127 to 127."""

_int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
_EXACT = 2**24 // LARGEST**2  # this many products are summed exactly in float32, in any order


class Quantized(NamedTuple):
    """Rows of integers with a scale each.

    Attributes:
        q: int8 (R, C).
        scale: float32 (R,).
    """

    q: Tensor
    scale: Tensor


def quantize(x: Tensor, generator: torch.Generator | None = None) -> Quantized:
    """Quantize symmetrically to int8 by row: ``s = max|x| / 127``, ``q = round(x / s)``.

    Args:
        x: float32 (R, C).
        generator: on ``x``'s device, to round stochastically, so that ``s q`` has the mean ``x``. None rounds to nearest, ties
            to even. Zeros stay zero.

    Returns:
        The integers and scales. The scale of a row with an infinity or NaN is not finite, so neither is the product.
    """
    scale = x.abs().amax(1) / LARGEST
    t = (x / scale.unsqueeze(1)).nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)  # 0 / 0 in a row of zeros
    if generator is None:
        return Quantized(t.round_().to(torch.int8), scale)
    down = t.floor()
    up = torch.rand(t.shape, generator=generator, device=t.device, dtype=torch.float32) < t.sub_(down)
    return Quantized(down.add_(up).to(torch.int8), scale)


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply integer matrices exactly.

    CUDA uses ``torch._int_mm``. It needs more than 16 rows and multiples of 8, so operands are padded with zeros, and on an
    H100 it is twelve times as fast if both are contiguous along the sum. A CPU uses the same function where it is correct,
    which is checked once, and otherwise float32 products of blocks.

    Args:
        a: int8 (M, K), from -127 to 127.
        b: int8 (K, N), likewise.

    Returns:
        int32 (M, N).
    """
    if a.device.type == "cuda":
        return padded(a, b, _int_mm)
    one = 1 in (*a.shape, *b.shape)  # torch's CPU product is wrong if both strides of an operand are 1
    if a.device.type == "cpu" and not one and _cpu_is_right():
        return _int_mm(a, b)
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    for some_a, some_b in zip(a.split(_EXACT, 1), b.split(_EXACT), strict=True):
        y += (some_a.float() @ some_b.float()).int()
    return y


def padded(a: Tensor, b: Tensor, matmul: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Call a ``matmul`` that needs more than 16 rows, multiples of 8, and both operands contiguous along the sum."""
    (m, k), n = a.shape, b.shape[1]
    below, middle, right = max(24 - m, -m % 8), -k % 8, -n % 8
    b = b.t()
    if middle or below:
        a = nn.functional.pad(a, (0, middle, 0, below))
    if right or middle:
        b = nn.functional.pad(b, (0, middle, 0, right))
    return matmul(a.contiguous(), b.contiguous().t())[:m, :n]


@cache
def _cpu_is_right() -> bool:
    """Return whether this CPU's ``torch._int_mm`` is exact; without int8 instructions, some sum in 16 bits and saturate."""
    a = torch.full((32, 64), LARGEST, dtype=torch.int8)
    return all(bool((_int_mm(a, (sign * a).t()) == sign * 64 * LARGEST**2).all()) for sign in (1, -1))


class _INT8(Products):
    """``y = x̂ Ŵᵀ`` with ``x̂ = s_x q_x``, ``Ŵ = s_w q_w`` by row, and the gradients

    ``dx = Q(g s_w) q_w``,  ``dW = Q((g s_x)ᵀ) q_x``.

    A scale along the summed dimension cannot be factored out of an integer product. It is multiplied into the gradient, which
    is then quantized. The other operand is the integers of the forward pass. Given x̂ and Ŵ, the mean over the random numbers
    is therefore exactly ``g Ŵ`` and ``gᵀ x̂``.

    Args:
        draw: a function that returns a generator for the gradients of one backward pass; None rounds to nearest.
    """

    def __init__(self, draw: Callable[[torch.device], torch.Generator] | None) -> None:
        self._draw = draw

    @override
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        a, w = quantize(x), quantize(weight)
        y = int8_matmul(a.q, w.q.t()).float().mul_(a.scale.unsqueeze(1)).mul_(w.scale)
        # scales as integers, so that activation compression leaves them alone
        return y, (a.q, a.scale.view(torch.int32), w.q, w.scale.view(torch.int32))

    @override
    def backward(
        self, saved: tuple[Tensor, ...], g: Tensor, *, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        q_x, s_x, q_w, s_w = saved
        s_x, s_w = s_x.view(torch.float32), s_w.view(torch.float32)
        generator = None if self._draw is None else self._draw(g.device)
        dx = dw = None
        if needs_x:
            q, s = quantize(g * s_w, generator)
            dx = int8_matmul(q, q_w).float().mul_(s.unsqueeze(1))
        if needs_weight:
            q, s = quantize(g.t() * s_x, generator) if len(g) else Quantized(q_x.new_zeros(g.t().shape), s_w)
            dw = int8_matmul(q, q_x).float().mul_(s.unsqueeze(1))
        return dx, dw


class INT8Precision(LinearPrecision):
    """Run linear layers in INT8, in the forward and the backward pass.

    Inputs are quantized by row (per token) and weights by output channel, both symmetrically and to nearest. Gradients are
    quantized by row for ``dx`` and by output channel for ``dW``, with the stochastic rounding of DoReFa, which keeps them
    unbiased given the quantized operands. Sums are exact, in int32. Bias gradients are not quantized. The base plugin stores
    and updates the weights.

    Use it on hardware with int8 units: CUDA tensor cores, or CPUs with int8 instructions. Elsewhere it is slower than its
    base. It adds noise to the gradient. Between forward and backward, a layer stores one byte per element of its input and
    weight.

    It differs from DoReFa in one point. DoReFa's 2^8 levels of a gradient are the odd multiples of ``max|g| / 255``, which
    turns a zero gradient into noise. Here the levels are the 255 multiples of ``max|g| / 127`` from -127 to 127, with the same
    mean and step, so zeros stay zero.

    Args:
        base: the plugin for everything else. "32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", or a plugin.
            Float64 operands are rounded to float32 first.
        skip: the layers to leave unchanged. "head" is the layers outside the blocks; other entries are dotted paths.
        stochastic_rounding: whether gradients are rounded stochastically. Rounding to nearest loses small ones to zero.

    Raises:
        ValueError: for a value out of range. At setup, if no linear layer remains.
        TypeError: if ``base`` has the wrong type.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, plugins=[INT8Precision()])

    References:
        Zhou et al. 2016, "DoReFa-Net", arXiv:1606.06160.
    """

    saves: ClassVar[str] = "time of linear layers on int8 units; 1 byte per stored activation"
    paper: ClassVar[str] = "Zhou et al. 2016 (DoReFa), arXiv:1606.06160"
    constraints: ClassVar[str] = "adds gradient noise; slower without int8 units"
    survey: ClassVar[Survey | None] = Survey("INT8 and low-bit training", zhuang="3", shen="4.2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"stochastic_rounding": Choice((True, False))},
        lambda profile: None if profile.int8 else "the device has no fast int8 matrix units",
    )

    @declared
    def __init__(
        self,
        base: str | Precision = "bf16-mixed",
        *,
        skip: Skip = ("head",),
        stochastic_rounding: bool = True,
    ) -> None:
        super().__init__(base, skip=skip)
        self.stochastic_rounding = stochastic_rounding

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        def draw(device: torch.device) -> torch.Generator:
            return self.generator(m.path, device)

        return linear_in(_INT8(draw if self.stochastic_rounding else None))

    @override
    def describe(self) -> str:
        rounded = "stochastically" if self.stochastic_rounding else "to nearest"
        return f"INT8 by row and output channel, gradients rounded {rounded} (sums in int32)"
