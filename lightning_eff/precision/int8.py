"""Linear layers in integers of few bits in both passes, with stochastically rounded gradients (DoReFa, arXiv:1606.06160)."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Either, Number, OneOf
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.kernels.int8_quantization import LARGEST, in_torch, quantize_rows
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import LinearPrecision, Skip
from lightning_eff.precision._linear.products import Arithmetic, Products, linear_in
from lightning_eff.precision._low_bit.mixed import CHOICES, MixedBits
from lightning_eff.precision._low_bit.rules import RULES, UNQUANTIZED, Draw, emulated

_int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
_EXACT = 2**24 // LARGEST**2  # this many products are summed exactly in float32, in any order


class Quantized(NamedTuple):
    """Rows of integers with a scale each.

    Attributes:
        q: int8 (R, C); int16 above 8 bits, and float32 without quantization.
        scale: float32 (R,).
    """

    q: Tensor
    scale: Tensor


def quantize(
    x: Tensor,
    generator: torch.Generator | None = None,
    *,
    factor: Tensor | None = None,
    stream: int = 0,
    bits: int = 8,
) -> Quantized:
    """Quantize symmetrically by row: ``s = max|x| / (2^(bits-1) - 1)``, ``q = round(x / s)``.

    Args:
        x: float32 (R, C).
        generator: on ``x``'s device, to round stochastically, so that ``s q`` has the mean ``x``. None rounds to nearest, ties
            to even. Zeros stay zero. CUDA uses only its seed.
        factor: float32 (C,), multiplied into each row first.
        stream: 0 or 1, different for the two calls that use one generator.
        bits: from 2 to 16, or 32 to leave ``x`` unquantized, with scales of 1.

    Returns:
        The integers and scales. The scale of a row with an infinity or NaN is not finite, so neither is the product.
    """
    if bits == UNQUANTIZED:
        return Quantized(x if factor is None else x * factor, x.new_ones(len(x)))
    if x.is_cuda and bits == 8:
        seed = None if generator is None else (2 * generator.initial_seed() + stream) % 2**63
        return Quantized(*quantize_rows(x, factor=factor, seed=seed))
    return Quantized(*in_torch(x if factor is None else x * factor, generator, 2 ** (bits - 1) - 1))


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return ``s q`` of :func:`quantize`."""
    q, scale = quantize(x, bits=bits)
    return q * scale.unsqueeze(1)


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


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply integers exactly: by :func:`int8_matmul` if both are int8, and in float64 otherwise."""
    if a.dtype == b.dtype == torch.int8:
        return int8_matmul(a, b).float()
    return a.double() @ b.double()


class _INT8(Products):
    """``y = x̂ Ŵᵀ`` with ``x̂ = s_x q_x``, ``Ŵ = s_w q_w`` by row, and the gradients

    ``dx = Q(g s_w) q_w``,  ``dW = Q((g s_x)ᵀ) q_x``.

    A scale along the summed dimension cannot be factored out of an integer product. It is multiplied into the gradient, which
    is then quantized. The other operand is the integers of the forward pass. Given x̂ and Ŵ, the mean over the random numbers
    is therefore exactly ``g Ŵ`` and ``gᵀ x̂``.

    Args:
        draw: a function that returns a generator for the gradients of one backward pass; None rounds to nearest.
        bits: those of weights, inputs and gradients.
    """

    def __init__(self, draw: Draw, bits: tuple[int, int, int] = (8, 8, 8)) -> None:
        self._draw, self._bits = draw, bits

    @override
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        a, w = quantize(x, bits=self._bits[1]), quantize(weight, bits=self._bits[0])
        y = _product(a.q, w.q.t()).mul_(a.scale.unsqueeze(1)).mul_(w.scale).float()
        # scales as integers, so that activation compression leaves them alone
        return y, (a.q, a.scale.view(torch.int32), w.q, w.scale.view(torch.int32))

    @override
    def backward(
        self, saved: tuple[Tensor, ...], g: Tensor, *, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        q_x, s_x, q_w, s_w = saved
        s_x, s_w = s_x.view(torch.float32), s_w.view(torch.float32)
        generator, bits = None if self._draw is None else self._draw(g.device), self._bits[2]
        dx = dw = None
        if needs_x:
            q, s = quantize(g, generator, factor=s_w, bits=bits)
            dx = _product(q, q_w).mul_(s.unsqueeze(1)).float()
        if needs_weight:
            q, s = (
                quantize(g.t(), generator, factor=s_x, stream=1, bits=bits)
                if len(g)
                else Quantized(q_x.new_zeros(g.t().shape), s_w)
            )
            dw = _product(q, q_x).mul_(s.unsqueeze(1)).float()
        return dx, dw


_Bits = Either(Count(at_most=16), OneOf(UNQUANTIZED))
_BitsOrAuto = Either(Count(at_most=16), OneOf(UNQUANTIZED), OneOf("auto"))
_BUDGET = 4.0


class INT8Precision(LinearPrecision):
    """Run linear layers in INT8, or in other integers of 1 to 16 bits, in the forward and the backward pass.

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

    **Other numbers of bits.** With 2 to 8 bits, int8 units compute with fewer levels. More than 8 bits are emulated by exact
    products in float64, so they are slow. ``weight_bits="auto"`` and ``activation_bits="auto"`` choose 2 to 8 bits for each
    layer, with ``budget`` bits per element on average. As in HAQ, layers that affect the loss more get more bits. Their
    sensitivities are measured in the backward pass of the first step and of every ``interval``-th pass, at the cost of about
    nine more products per layer.

    **Rules of other papers**, emulated for studies, with sums in float64. Weights and inputs are rounded in both passes, and
    their gradients pass the rounding unchanged.

    - ``rule="dorefa"``: weights are normalised by tanh to [-1, 1] (at 1 bit: their sign times their mean magnitude), inputs
      are clipped to [0, 1], and gradients get noise and a scale per sample. The first dimension of an input is the batch.
    - ``rule="qnn"``: weights and inputs are clipped to [-1, 1] (at 1 bit: their sign), and the stored weights too after each
      step of the optimizer. Gradients are not quantized.
    - ``rule="fixed_point"``: INT16 with one power of two per tensor.

    DoReFa and QNN assume that an activation bounds the inputs and that norms follow the layers, because weights change
    their scale. A warning names the layer whose inputs are clipped most, if it is more than half of them.

    Args:
        base: the plugin for everything else. "32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", or a plugin.
            Float64 operands are rounded to float32 first.
        skip: the layers to leave unchanged. "head" is the layers outside the blocks; other entries are dotted paths.
        stochastic_rounding: whether gradients are rounded stochastically. Rounding to nearest loses small ones to zero.
        rule: how numbers are rounded: "rows" as above, or a paper's rule.
        weight_bits: the bits of weights, from 1 to 16, 32 for none, or "auto". None is 8, and 1, 1 and 16 for the papers'
            rules in the order above. "rows" and "fixed_point" need 2.
        activation_bits: the bits of inputs, likewise. None is 8, or 2, 1 and 16.
        gradient_bits: the bits of gradients, from 1 to 16 or 32. None is 8, or 6, 32 and 16.
        budget: the average bits per element for "auto". None is 4.
        interval: the number of backward passes between two measurements for "auto".

    Raises:
        ValueError: for a value out of range, or settings that exclude each other. At setup, if no linear layer remains.
        TypeError: if ``base`` has the wrong type.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, plugins=[INT8Precision()])

    References:
        Zhou et al. 2016, "DoReFa-Net", arXiv:1606.06160. Hubara et al. 2016, "Quantized Neural Networks", arXiv:1609.07061.
        Das et al. 2018, "Mixed Precision Training of Convolutional Neural Networks using Integer Operations",
        arXiv:1802.00930. Wang et al. 2019, "HAQ", arXiv:1811.08886.
    """

    saves: ClassVar[str] = "time of linear layers on int8 units; 1 byte per stored activation"
    paper: ClassVar[str] = (
        "Zhou et al. 2016 (DoReFa), arXiv:1606.06160; Hubara et al. 2016 (QNN), arXiv:1609.07061; Das et al. 2018,"
        " arXiv:1802.00930; Wang et al. 2019 (HAQ), arXiv:1811.08886"
    )
    constraints: ClassVar[str] = "adds gradient noise; slower without int8 units; other rules are emulated and slow"
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
        rule: Literal["rows", "dorefa", "qnn", "fixed_point"] = "rows",
        weight_bits: Annotated[int | Literal["auto"] | None, _BitsOrAuto] = None,
        activation_bits: Annotated[int | Literal["auto"] | None, _BitsOrAuto] = None,
        gradient_bits: Annotated[int | None, _Bits] = None,
        budget: Annotated[float | None, Number(at_least=CHOICES[0], at_most=CHOICES[-1])] = None,
        interval: Annotated[int, Count()] = 1000,
    ) -> None:
        super().__init__(base, skip=skip)
        self.stochastic_rounding = stochastic_rounding
        self.rule, self.interval = rule, interval
        names = ("weight_bits", "activation_bits", "gradient_bits")
        given = dict(zip(names, (weight_bits, activation_bits, gradient_bits), strict=True))
        defaults = dict(zip(names, RULES[rule].defaults if rule in RULES else (8, 8, 8), strict=True))
        bits: dict[str, Any] = {name: defaults[name] if given[name] is None else given[name] for name in names}
        self.weight_bits, self.activation_bits, self.gradient_bits = bits.values()
        self._check_bits(bits)
        auto = "auto" in bits.values()
        if budget is not None and not auto:
            raise ValueError(
                f"INT8Precision({budget=}): a budget is an average, but all layers have the same bits. Set"
                " weight_bits='auto' or activation_bits='auto', or remove budget."
            )
        self.budget = _BUDGET if auto and budget is None else budget
        self._mixed: MixedBits | None = None
        if self.budget is not None:
            self._mixed = MixedBits(self.budget, weights=weight_bits == "auto", inputs=activation_bits == "auto")
        self._measured_at: int | None = None
        self._measuring = False
        self._clipped: dict[str, Tensor] = {}

    def _check_bits(self, bits: dict[str, Any]) -> None:
        least = RULES[self.rule].least if self.rule in RULES else 2
        for name, value in bits.items():
            if value == "auto" and self.rule != "rows":
                raise ValueError(
                    f"INT8Precision(rule={self.rule!r}, {name}='auto'): this rule changes the scale of what it rounds, so"
                    " the effect of its rounding alone cannot be measured. Set a number of bits, or rule='rows'."
                )
            if value != "auto" and value < least:
                raise ValueError(
                    f"INT8Precision(rule={self.rule!r}, {name}={value}): one bit leaves only zero in this rule. Set at"
                    " least 2 bits, or rule='dorefa'."
                )
        if self.rule == "qnn" and bits["gradient_bits"] != UNQUANTIZED:
            raise ValueError(
                f"INT8Precision(rule='qnn', gradient_bits={bits['gradient_bits']}): QNN's rule has no gradients of few"
                " bits here. Remove gradient_bits, or set rule='dorefa'."
            )

    def _bits(self, path: str) -> tuple[int, int, int]:
        if self._mixed is None:
            return self.weight_bits, self.activation_bits, self.gradient_bits
        of_weights = self._mixed("weights", path, self.weight_bits)
        return of_weights, self._mixed("inputs", path, self.activation_bits), self.gradient_bits

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        def draw(device: torch.device) -> torch.Generator:
            return self.generator(m.path, device)

        drawing = draw if self.stochastic_rounding else None
        if self.rule in RULES:
            return self._watched(m.path, emulated(RULES[self.rule], self._bits(m.path), drawing))
        if self._mixed is None:
            return linear_in(_INT8(drawing, self._bits(m.path)))
        mixed = self._mixed

        def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = linear_in(_INT8(drawing, self._bits(m.path)))(x, weight, bias)
            if self._measuring:
                mixed.watch(m.path, x, weight, y, rounded)
            return y

        return compute

    def _watched(self, path: str, compute: Arithmetic) -> Arithmetic:
        """Record which share of a layer's inputs is clipped in the first training step."""
        bounds = RULES[self.rule].bounds
        if bounds is None or self.activation_bits == UNQUANTIZED:
            return compute

        def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self._measuring and path not in self._clipped and x.numel():
                self._clipped[path] = ((x.detach() < bounds[0]) | (x.detach() > bounds[1])).float().mean()
            return compute(x, weight, bias)

        return watched

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        if self._mixed is None:
            self._measuring = not self._passes
        elif self._measured_at is None or self._passes - self._measured_at >= self.interval:
            self._measuring, self._measured_at = True, self._passes
        else:
            self._measuring = self._measured_at == self._passes  # a step that ran no backward pass is repeated
        self._clipped = {}
        with super().train_step_context():
            yield
        if self._clipped:
            path, share = max(((path, float(share)) for path, share in self._clipped.items()), key=lambda item: item[1])
            low, high = RULES[self.rule].bounds or (0, 1)
            if share > 0.5:
                rank_zero_warn(
                    f"INT8Precision(rule={self.rule!r}): {share:.0%} of the inputs of {path} are outside [{low:g}, {high:g}]"
                    " and are clipped. Put a bounded activation or a norm before it, list it in skip, or set"
                    " activation_bits=32."
                )

    @override
    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, model, optimizer, *args, **kwargs)
        if self._mixed is not None and self._measuring and self._mixed.settle(_gathered):
            weights, inputs = (self._mixed.average(kind) for kind in ("weights", "inputs"))
            said = [f"{a:.2f} bits per {of}" for a, of in ((weights, "weight"), (inputs, "input")) if a is not None]
            rank_zero_info(f"INT8Precision: chose {' and '.join(said)} on average after {self._passes} backward passes")

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        if self.rule == "qnn" and self.weight_bits != UNQUANTIZED:
            with torch.no_grad():
                for m in self._maps:
                    if isinstance(m.module.weight, Tensor) and m.module.weight.requires_grad:
                        m.module.weight.clamp_(-1, 1)
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._mixed is not None:
            state |= {"mixed": self._mixed.state_dict(), "measured_at": self._measured_at}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._mixed is not None and "mixed" in state_dict:
            self._mixed.load_state_dict(state_dict["mixed"])
            self._measured_at = state_dict["measured_at"]

    @override
    def describe(self) -> str:
        toward = "stochastically" if self.stochastic_rounding else "to nearest"
        bits = (self.weight_bits, self.activation_bits, self.gradient_bits)
        if self.rule in RULES:
            w, a, g = bits
            return f"{RULES[self.rule].paper} with {w}-bit weights, {a}-bit inputs and {g}-bit gradients (emulated)"
        if bits == (8, 8, 8):
            return f"INT8 by row and output channel, gradients rounded {toward} (sums in int32)"
        w, a, g = bits
        return f"integers by row and output channel (weights {w}, inputs {a}, gradients {g} bits), gradients rounded {toward}"


def _gathered(own: Any) -> list[Any]:
    """Return the value of every rank; collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found
