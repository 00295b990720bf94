"""Emulated FP8 training with chunked accumulation and FP16 weights (Wang et al. 2018, arXiv:1812.08011)."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core.search_space import SearchSpace
from lightning_eff.precision._formats.formats import FP8_152, FP16_169, cast_fp8, round_to
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import LinearPrecision, Skip
from lightning_eff.precision._linear.products import Arithmetic, Products, linear_in

Accumulate = Literal["exact", "float32"]

_ELEMENTS = 2**18
"""The number of partial sums per pass: 1 MiB, which fits into a CPU's cache."""


def to_fp8(x: Tensor) -> Tensor:
    """Round to 1-5-2, to nearest with ties to even, and saturate; infinities and NaN stay.

    Args:
        x: float32, any shape.

    Returns:
        ``float8_e5m2``, the shape of ``x``. It has the same numbers as 1-5-2.
    """
    assert FP8_152.dtype is not None
    return torch.where(x.isinf(), x, cast_fp8(x, FP8_152.dtype).float()).to(FP8_152.dtype)


def chunked_matmul(a: Tensor, b: Tensor, chunk: int, accumulate: Accumulate = "exact") -> Tensor:
    """Return ``a b`` with partial sums in FP16 1-6-9, chunk by chunk (figure 3a of the paper).

        s_c = 0;  s_c = R(s_c + a_k b_k)  for k in chunk c, in order
        y = 0;    y = R(y + s_c)          for all chunks, in order

    R rounds to 1-6-9, to nearest with ties to even. Products of 1-5-2 numbers are 1-6-9 numbers. The sum of two of them,
    rounded to float32 and then to 1-6-9, equals the exact sum rounded to 1-6-9, because 24 >= 2 · 10 + 2 bits.

    Args:
        a: (M, K), float32, 1-5-2 numbers.
        b: (K, N), likewise.
        chunk: the length of a chunk; the last one may be shorter.
        accumulate: "float32" sums each chunk in float32, in the device's own order, and rounds its sum once.

    Returns:
        (M, N), float32, 1-6-9 numbers. Overflow is infinite.
    """
    (m, k), n = a.shape, b.shape[1]
    num = -(-k // chunk)
    chunk = min(chunk, k)
    a = nn.functional.pad(a, (0, num * chunk - k)).view(m, num, chunk)
    b = nn.functional.pad(b, (0, 0, 0, num * chunk - k)).view(num, chunk, n)
    y = a.new_empty(m, n)
    rows = max(1, _ELEMENTS // max(1, num * n))
    for some, out in zip(a.split(rows), y.split(rows), strict=True):  # rows are independent of each other
        if accumulate == "float32":
            sums = _to_169(torch.einsum("mck,ckn->cmn", some, b))
        else:
            sums = a.new_zeros(num, len(some), n)
            steps = some.permute(2, 1, 0).unsqueeze(-1), b.transpose(0, 1).unsqueeze(-2)
            for a_k, b_k in zip(*steps, strict=True):  # (C, M, 1) and (C, 1, N)
                sums = _to_169(sums.addcmul_(a_k, b_k))
        total = a.new_zeros(len(some), n)
        for s in sums:
            total = _to_169(total.add_(s))
        out.copy_(total)
    return y


def _to_169(x: Tensor) -> Tensor:
    return round_to(x, FP16_169, saturate=False)


class _Wang2018(Products):
    """``y = x̂ Ŵᵀ``, ``dx = ĝ Ŵ / S`` and ``dW = ĝᵀ x̂ / S``, with ``ĝ = FP8(S g)``.

    Args:
        matmul: the matrix product.
        scale: S.
    """

    def __init__(self, matmul: Callable[[Tensor, Tensor], Tensor], scale: float) -> None:
        self._matmul, self._scale = matmul, scale

    @override
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        a, w = to_fp8(x), to_fp8(weight)
        return self._matmul(a.float(), w.float().t()), (a, w)

    @override
    def backward(
        self, saved: tuple[Tensor, ...], g: Tensor, *, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        a, w = saved
        g_hat = to_fp8(g * self._scale).float()
        dx = self._matmul(g_hat, w.float()) / self._scale if needs_x else None
        dw = self._matmul(g_hat.t(), a.float()) / self._scale if needs_weight else None
        return dx, dw


class Wang2018FP8Precision(LinearPrecision):
    """Emulate linear layers in FP8 with chunked FP16 sums, and weights in FP16 with stochastic rounding.

    It follows Wang et al. 2018:

    - The inputs, weights and gradients of a layer's three products, ``x Wᵀ``, ``g W`` and ``gᵀ x``, are rounded to FP8 1-5-2,
      to nearest. Products are summed in FP16 1-6-9 in chunks, see :func:`chunked_matmul`. A long sum in 16 bits loses its
      small terms; a sum of short sums does not.
    - After each optimizer step, every parameter with a gradient is rounded stochastically to FP16 1-6-9, and so is SGD's
      momentum. The optimizer itself computes in float32. Other optimizer states stay unchanged, because this format would
      flush Adam's second moments, which are squares, to zero.
    - Gradients are multiplied by ``loss_scale`` before they are rounded, and products are divided by it. This is equivalent
      to a scaled loss, but the loss, the gradients and gradient clipping stay unscaled.

    Use it to study the method on small models. No hardware has these formats, so they are emulated bit by bit, at a small
    fraction of the base plugin's speed. Between forward and backward, a layer stores one byte per element of its input and
    weight.

    Args:
        chunk: the number of products per chunk, CL in the paper, which uses 64. 1 is plain accumulation in FP16.
        base: the plugin for everything else. "32-true", "bf16-mixed", or another plugin that keeps parameters in float32
            and does not scale the loss.
        loss_scale: the factor of the gradients before rounding, as in the paper. Gradients beyond ``57344 / loss_scale`` are
            clamped to it.
        accumulate: the precision of the sums within a chunk. "exact" is the paper's FP16. "float32" is many times faster and
            more accurate, and rounds only the sums of chunks.
        skip: the layers to leave unchanged. "head" is the layers outside the blocks; other entries are dotted paths. Their
            weights are still rounded to FP16 1-6-9.

    Raises:
        ValueError: for a value out of range, or if the base scales the loss. At setup, if no linear layer remains or a
            parameter is not float32.
        TypeError: if ``base`` has the wrong type.

    Example:
        >>> trainer = L.Trainer(max_epochs=1, plugins=[Wang2018FP8Precision(accumulate="float32")])

    References:
        Wang et al. 2018, "Training Deep Neural Networks with 8-bit Floating Point Numbers", arXiv:1812.08011.
    """

    saves: ClassVar[str] = (
        "activation memory of linear layers (1 byte per element), but no time, because it is emulated"
    )
    paper: ClassVar[str] = "Wang et al. 2018, arXiv:1812.08011"
    constraints: ClassVar[str] = "for study: emulated, and very slow. Needs float32 parameters"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        pointless=lambda profile: "it is emulated for study, and very slow"
    )

    @declared
    def __init__(
        self,
        chunk: Annotated[int, Count()] = 64,
        base: str | Precision = "32-true",
        *,
        loss_scale: Annotated[float, Number(above=0)] = 1000.0,
        accumulate: Accumulate = "exact",
        skip: Skip = ("head",),
    ) -> None:
        super().__init__(base, skip=skip)
        if self.scaler is not None:
            raise ValueError(
                f"Wang2018FP8Precision(base of {type(self.inner).__name__}): the base plugin scales the loss too, and FP8"
                " would clamp gradients that are scaled twice. Set base='32-true' or 'bf16-mixed'."
            )
        self.chunk, self.loss_scale = chunk, float(loss_scale)
        self.accumulate: Accumulate = accumulate

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return chunked_matmul(a, b, self.chunk, self.accumulate)

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        return linear_in(_Wang2018(self._matmul, self.loss_scale))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = super().convert_module(module)
        for name, p in module.named_parameters():
            if p.is_floating_point() and p.dtype != torch.float32:
                self._patches.restore()
                raise ValueError(
                    f"Wang2018FP8Precision: the parameter {name} is {p.dtype}, but FP16 1-6-9 needs torch.float32. Set"
                    " base='32-true' or 'bf16-mixed'."
                )
        return module

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._round_weights(optimizer)
        return result

    @torch.no_grad()
    def _round_weights(self, optimizer: Any) -> None:
        """Round the weights with the same random numbers on every rank, so that they stay equal."""
        self.seed()  # draws the run's seed
        assert self._seed is not None
        number, self._draws[""] = self._draws[""], self._draws[""] + 1
        key = rng.keyed_generator(self._seed, "Wang2018FP8Precision.weights", self._passes, number).initial_seed()
        generators: dict[torch.device, torch.Generator] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if p.device not in generators:
                generators[p.device] = torch.Generator(p.device).manual_seed(key)
            for t in (p, optimizer.state.get(p, {}).get("momentum_buffer")):
                if t is not None:
                    t.copy_(round_to(t.detach(), FP16_169, generator=generators[p.device], stochastic=True))

    @override
    def describe(self) -> str:
        sums = "FP16 1-6-9" if self.accumulate == "exact" else "float32"
        return f"{FP8_152.name} with sums in {sums} over chunks of {self.chunk}, and all weights in {FP16_169.name} (emulated)"
