"""Weights, inputs and gradients of 1 to 16 bits, by the rules of three papers.

DoReFa (Zhou et al. 2016, arXiv:1606.06160), with ``q_k(r) = round((2^k - 1) r) / (2^k - 1)`` for r in [0, 1]:

    weights    2 q_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1;   at 1 bit  sign(w) E|w|
    inputs     q_k(min(max(x, 0), 1))
    gradients  2 max|g| (q_k(g / (2 max|g|) + 1/2 + N) - 1/2),   N ~ U(-1/2, 1/2) / (2^k - 1),   the maximum by sample

QNN (Hubara et al. 2016, arXiv:1609.07061), for weights and inputs, with ``d = 2^(1-k)``:

    min(max(round(x / d) d, -1), 1 - d);   at 1 bit  sign(x);   the gradient passes where |x| <= 1

Dynamic fixed point (Das et al. 2018, arXiv:1802.00930), for all three, with one exponent per tensor:

    2^E round(x / 2^E),   E = floor(log2 max|x|) - (k - 2)

A rounding passes its gradient unchanged (straight-through). ``sign(0)`` is 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.precision._linear.products import Arithmetic, Products, linear_in

UNQUANTIZED = 32
Draw = Callable[[torch.device], torch.Generator] | None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, None


def _through(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``rounded(x)``, whose gradient passes unchanged to ``x``."""
    y: Any = _StraightThrough.apply(x, rounded)
    return y


def _sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x)


def quantize_k(r: Tensor, k: int) -> Tensor:
    """Round numbers in [0, 1] to multiples of ``1 / (2^k - 1)``, to nearest and halfway to even."""
    n = 2**k - 1
    return (r * n).round() / n


def dorefa_weights(w: Tensor, k: int) -> Tensor:
    """Return DoReFa's weights in [-1, 1]; at 1 bit they are plus or minus the mean magnitude. Zeros alone stay zero."""
    if k == 1:
        mean = w.detach().abs().mean()
        return _through(w, lambda w: _sign(w) * mean)
    t = torch.tanh(w)
    most = t.abs().max()
    there = most > 0
    r = t / (2 * torch.where(there, most, 1.0)) + 0.5
    return torch.where(there, 2 * _through(r, lambda r: quantize_k(r, k)) - 1, t)


def dorefa_inputs(x: Tensor, k: int) -> Tensor:
    """Return DoReFa's inputs in [0, 1]. The gradient passes where ``x`` is."""
    return _through(x.clamp(0, 1), lambda x: quantize_k(x, k))


def dorefa_gradients(g: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """Return DoReFa's gradients.

    Args:
        g: (B, n), a row per sample. A sample of zeros stays zero.
        k: the bits.
        generator: for the noise, on ``g``'s device. None adds none.
    """
    n = 2**k - 1
    most = g.abs().amax(1, keepdim=True)
    r = g / (2 * torch.where(most == 0, 1.0, most)) + 0.5
    if generator is not None:
        r = r + (torch.rand(g.shape, generator=generator, device=g.device, dtype=g.dtype) - 0.5) / n
    return 2 * most * (quantize_k(r.clamp(0, 1), k) - 0.5)


def qnn(x: Tensor, k: int) -> Tensor:
    """Return QNN's weights or inputs in [-1, 1]. The gradient passes where ``x`` is."""
    if k == 1:
        return _through(x.clamp(-1, 1), _sign)
    d = 2.0 ** (1 - k)
    return _through(x.clamp(-1, 1), lambda x: ((x / d).round() * d).clamp(max=1 - d))


def fixed_point(x: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Return integers of k bits times one power of two, to nearest, or stochastically with a ``generator``.

    All are NaN if one number is not finite.
    """
    if not x.numel():
        return x
    most = x.detach().abs().max()
    unit = torch.exp2((torch.frexp(most).exponent + 1 - k).double())  # 2^E, since frexp's exponent is floor(log2) + 1
    unit = torch.where(most.isfinite(), unit, torch.nan)
    t = x.detach().double() / unit
    if generator is None:
        t = t.round()
    else:
        t = (t + torch.rand(t.shape, generator=generator, device=t.device, dtype=t.dtype)).floor()
    return (t.clamp(-(2 ** (k - 1)), 2 ** (k - 1) - 1) * unit).float()


@dataclass(frozen=True)
class Rule:
    """A paper's rules for one linear layer.

    Attributes:
        paper: its name in messages.
        defaults: the bits of weights, inputs and gradients that the paper mainly uses.
        least: the fewest bits.
        weights: ``f(w, k)``.
        inputs: ``f(x, k)``.
        gradients: ``f(g, k, generator)`` with a row per sample; None if the paper has no such rule.
        bounds: the range that inputs are clipped to.
    """

    paper: str
    defaults: tuple[int, int, int]
    least: int
    weights: Callable[[Tensor, int], Tensor]
    inputs: Callable[[Tensor, int], Tensor]
    gradients: Callable[[Tensor, int, torch.Generator | None], Tensor] | None
    bounds: tuple[float, float] | None = None


def _fixed_point_through(x: Tensor, k: int) -> Tensor:
    return _through(x, lambda x: fixed_point(x, k))


RULES = {
    "dorefa": Rule("DoReFa", (1, 2, 6), 1, dorefa_weights, dorefa_inputs, dorefa_gradients, (0.0, 1.0)),
    "qnn": Rule("QNN", (1, 1, UNQUANTIZED), 1, qnn, qnn, None, (-1.0, 1.0)),
    "fixed_point": Rule(
        "dynamic fixed point", (16, 16, 16), 2, _fixed_point_through, _fixed_point_through, fixed_point
    ),
}


class _Emulated(Products):
    """``y = x̂ Ŵᵀ``, ``dx̂ = ĝ Ŵ``, ``dŴ = ĝᵀ x̂``, each summed in float64 and rounded once."""

    def __init__(self, quantize: Callable[[Tensor], Tensor]) -> None:
        self._quantize = quantize

    @override
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return (x.double() @ weight.double().t()).float(), (x, weight)

    @override
    def backward(
        self, saved: tuple[Tensor, ...], g: Tensor, *, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = saved
        g = self._quantize(g).double()
        dx = (g @ weight.double()).float() if needs_x else None
        dw = (g.t() @ x.double()).float() if needs_weight else None
        return dx, dw


def emulated(rule: Rule, bits: tuple[int, int, int], draw: Draw) -> Arithmetic:
    """Return the linear layer whose weights, inputs and output gradients have these bits, 32 for unquantized ones.

    Args:
        rule: the rules. The first dimension of an input is that of samples.
        bits: those of weights, inputs and gradients.
        draw: a function that returns a generator for one backward pass; None rounds gradients to nearest.
    """
    of_weights, of_inputs, of_gradients = bits

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        samples = len(x) if x.ndim > 1 else 1

        def quantize(g: Tensor) -> Tensor:
            if of_gradients == UNQUANTIZED or rule.gradients is None or not g.numel():
                return g
            generator = None if draw is None else draw(g.device)
            return rule.gradients(g.reshape(samples, -1), of_gradients, generator).view(g.shape)

        a = x.float() if of_inputs == UNQUANTIZED else rule.inputs(x.float(), of_inputs)
        w = weight.float() if of_weights == UNQUANTIZED else rule.weights(weight.float(), of_weights)
        return linear_in(_Emulated(quantize))(a, w, bias).to(x.dtype)

    return compute
