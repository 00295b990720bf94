"""Linear maps in INT8 in both passes, gradients rounded stochastically (DoReFa: Zhou et al. 2016, arXiv:1606.06160)."""

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import Arithmetic, LinearPrecision, by_rows

LARGEST = 127
"""Integers are from -127 to 127."""

_int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
_EXACT = 2**24 // LARGEST**2  # so many products sum up exactly in float32, in any order


class Quantized(NamedTuple):
    """Rows of integers and what one is worth.

    Attributes:
        q: int8 (R, C).
        scale: float32 (R,).
    """

    q: Tensor
    scale: Tensor


def quantize(x: Tensor, generator: torch.Generator | None = None) -> Quantized:
    """Symmetric int8 by row: ``s = max|x| / 127``, ``q = x / s`` rounded.

    Args:
        x: float32 (R, C).
        generator: on ``x``'s device, to round stochastically, so that ``s q`` has the mean ``x``; None rounds to
            nearest and halfway to even. Zeros stay zeros.

    Returns:
        The integers and scales. A row with an infinity or a NaN has such a scale, so that nothing finite is made of it.
    """
    scale = x.abs().amax(1) / LARGEST
    t = (x / scale.unsqueeze(1)).nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)  # 0 / 0 in a row of zeros
    if generator is None:
        return Quantized(t.round_().to(torch.int8), scale)
    down = t.floor()
    up = torch.rand(t.shape, generator=generator, device=t.device, dtype=torch.float32) < t.sub_(down)
    return Quantized(down.add_(up).to(torch.int8), scale)


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` of integers, exact.

    On CUDA by ``torch._int_mm``, which wants more than 16 rows and multiples of 8, to which operands are padded with
    zeros, and on an H100 is twelve times as fast where both lie along the sum, as they are laid; on CPU by the same
    where it is right, which is tried once, and by float32 products of blocks else.

    Args:
        a: int8 (M, K), from -127 to 127.
        b: int8 (K, N), likewise.

    Returns:
        int32 (M, N).
    """
    if a.device.type == "cuda":
        return padded(a, b, _int_mm)
    one = 1 in (*a.shape, *b.shape)  # torch's product on a CPU is wrong where both strides of an operand are 1
    if a.device.type == "cpu" and not one and _cpu_is_right():
        return _int_mm(a, b)
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    for some_a, some_b in zip(a.split(_EXACT, 1), b.split(_EXACT), strict=True):
        y += (some_a.float() @ some_b.float()).int()
    return y


def padded(a: Tensor, b: Tensor, matmul: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``matmul(a, b)`` for one that wants more than 16 rows, multiples of 8, and both laid along the sum."""
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
    """Whether this processor's ``torch._int_mm`` is exact: without int8 instructions some add in 16 bits and saturate."""
    a = torch.full((32, 64), LARGEST, dtype=torch.int8)
    return all(bool((_int_mm(a, (sign * a).t()) == sign * 64 * LARGEST**2).all()) for sign in (1, -1))


class _INT8Linear(torch.autograd.Function):
    """``y = x̂ Ŵᵀ + b`` with ``x̂ = s_x q_x``, ``Ŵ = s_w q_w`` by row, and backward

    ``dx = Q(g s_w) q_w``,  ``dW = Q((g s_x)ᵀ) q_x``,  ``db = Σ g``.

    A scale that runs along the summed dimension cannot stand outside of an integer product: it is taken into the
    gradient, which is quantised with it, and the other operand is the forward pass's own integers. So given x̂ and Ŵ
    the mean over the random numbers is ``g Ŵ`` and ``gᵀ x̂`` exactly.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        draw: Callable[[torch.device], torch.Generator] | None,
    ) -> Tensor:
        a, w = quantize(x.float()), quantize(weight.float())
        # scales as integers: what compresses saved floating-point tensors must leave them alone
        ctx.save_for_backward(a.q, a.scale.view(torch.int32), w.q, w.scale.view(torch.int32))
        ctx.draw = draw
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y = int8_matmul(a.q, w.q.t()).float().mul_(a.scale.unsqueeze(1)).mul_(w.scale)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- one result, one gradient
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_x, s_x, q_w, s_w = ctx.saved_tensors
        s_x, s_w = s_x.view(torch.float32), s_w.view(torch.float32)
        generator = None if ctx.draw is None else ctx.draw(g.device)
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            g = g.float()
            if ctx.needs_input_grad[0]:
                q, s = quantize(g * s_w, generator)
                dx = int8_matmul(q, q_w).float().mul_(s.unsqueeze(1)).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                q, s = quantize(g.t() * s_x, generator) if len(g) else Quantized(q_x.new_zeros(g.t().shape), s_w)
                dw = int8_matmul(q, q_x).float().mul_(s.unsqueeze(1)).to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                db = g.sum(0).to(ctx.dtypes[2])
        return dx, dw, db, None


class INT8Precision(LinearPrecision):
    """Run linear maps on operands in int8, the two products of the backward pass too.

    ``Trainer(plugins=[INT8Precision()])``. Inputs are quantised by row (a token), weights by output channel, both
    symmetrically and to nearest; gradients by row for ``dx`` and by output channel for ``dW``, stochastically, after
    DoReFa, so that these are unbiased given the quantised operands. Sums are exact, in int32; bias gradients are not
    quantised. Weights are kept and updated as in the base plugin.

    DoReFa's 2^8 levels of a gradient are the odd multiples of ``max|g| / 255``, without zero: it makes noise of a zero
    gradient. Here they are the 255 multiples of ``max|g| / 127`` from -127 to 127: mean and step are the same, and zeros
    stay.

    Products run on the device's int8 units: CUDA's tensor cores, and CPUs with int8 instructions. Between forward and
    backward a map holds one byte for each element of its input and of its weight.

    Args:
        base: the precision of all else: "32-true", "64-true", "16-true", "bf16-true" or "bf16-mixed", or a Precision
            plugin. Float64 operands are rounded to float32 first.
        skip: linear maps that stay as they are: "head" for those outside the blocks, and dotted paths.
        stochastic_rounding: of gradients; else they are rounded to nearest, which loses small ones to zero.

    Raises:
        ValueError: at setup, if no linear map is left.
        TypeError: if an argument is of another type.
    """

    saves: ClassVar[str] = "time of linear maps on int8 units, forward and backward; 1 byte an element saved"
    paper: ClassVar[str] = "Zhou et al. 2016 (DoReFa), arXiv:1606.06160"
    constraints: ClassVar[str] = "noise in the gradient; int8 units, else slower"
    survey: ClassVar[Survey | None] = Survey("INT8 and low-bit training", zhuang="3", shen="4.2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"stochastic_rounding": Choice((True, False))},
        lambda profile: None if profile.int8 else "the device multiplies int8 matrices no faster",
    )

    def __init__(
        self,
        base: str | Precision = "bf16-mixed",
        *,
        skip: Collection[str] = ("head",),
        stochastic_rounding: bool = True,
    ) -> None:
        if not isinstance(stochastic_rounding, bool):
            raise TypeError(f"INT8Precision({stochastic_rounding=}): expected True or False.")
        super().__init__(base, skip=skip)
        self.stochastic_rounding = stochastic_rounding

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        def draw(device: torch.device) -> torch.Generator:
            return self.generator(m.path, device)

        drawn = draw if self.stochastic_rounding else None
        return by_rows(lambda x, weight, bias: _INT8Linear.apply(x, weight, bias, drawn))

    @override
    def describe(self) -> str:
        rounded = "stochastically" if self.stochastic_rounding else "to nearest"
        return f"INT8 by row and output channel, gradients rounded {rounded} (sums in int32)"
