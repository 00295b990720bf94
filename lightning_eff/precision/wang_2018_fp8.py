"""Training in FP8 with chunked accumulation and weights in FP16 (Wang et al. 2018, arXiv:1812.08011), emulated."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core.search_space import SearchSpace, Survey
from lightning_eff.precision._formats.formats import FP8_152, FP16_169, cast_fp8, round_to
from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._linear.plugin import Arithmetic, LinearPrecision, by_rows

Accumulate = Literal["exact", "float32"]

_ELEMENTS = 2**18
"""Partial sums worked on at once: 1 MiB, which a processor's cache holds."""


def to_fp8(x: Tensor) -> Tensor:
    """Round to 1-5-2, to nearest and halfway to even, saturated; infinities and NaN stay.

    Args:
        x: float32, any shape.

    Returns:
        ``float8_e5m2``, the shape of ``x``: the same numbers as 1-5-2.
    """
    assert FP8_152.dtype is not None
    return torch.where(x.isinf(), x, cast_fp8(x, FP8_152.dtype).float()).to(FP8_152.dtype)


def chunked_matmul(a: Tensor, b: Tensor, chunk: int, accumulate: Accumulate = "exact") -> Tensor:
    """``a b`` with partial sums in FP16 1-6-9, chunk by chunk (the paper's figure 3a).

        s_c = 0;  s_c = R(s_c + a_k b_k)  for k in chunk c, in order
        y = 0;    y = R(y + s_c)          for all chunks, in order

    R rounds to 1-6-9, to nearest and halfway to even. Products of 1-5-2 numbers are 1-6-9 numbers; and a sum of two
    such, rounded to float32 and then to 1-6-9, is the exact sum rounded to 1-6-9, since 24 >= 2 · 10 + 2 bits.

    Args:
        a: (M, K), float32, 1-5-2 numbers.
        b: (K, N), likewise.
        chunk: length of a chunk; the last one may be shorter.
        accumulate: "float32" sums each chunk in float32, in whatever order the device does, and rounds its sum once.

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


class _Wang2018Linear(torch.autograd.Function):
    """``y = x̂ Ŵᵀ + b``, and backward ``dx = ĝ Ŵ / S``, ``dW = ĝᵀ x̂ / S``, ``db = Σ g``, with ``ĝ = FP8(S g)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        matmul: Callable[[Tensor, Tensor], Tensor],
        scale: float,
    ) -> Tensor:
        a, w = to_fp8(x.float()), to_fp8(weight.float())
        ctx.save_for_backward(a, w)
        ctx.matmul, ctx.scale = matmul, scale
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y = matmul(a.float(), w.float().t())
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- one result, one gradient
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        a, w = ctx.saved_tensors
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            g = g.float()
            g_hat = to_fp8(g * ctx.scale).float()
            if ctx.needs_input_grad[0]:
                dx = (ctx.matmul(g_hat, w.float()) / ctx.scale).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                dw = (ctx.matmul(g_hat.t(), a.float()) / ctx.scale).to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                db = g.sum(0).to(ctx.dtypes[2])
        return dx, dw, db, None, None


class Wang2018FP8Precision(LinearPrecision):
    """Run linear maps in FP8 with sums in FP16 by chunks, and keep all weights in FP16 with stochastic rounding.

    ``Trainer(plugins=[Wang2018FP8Precision()])``, after Wang et al. 2018:

    - Inputs, weights and gradients of the three products of a map, ``x Wᵀ``, ``g W`` and ``gᵀ x``, are rounded to FP8
      1-5-2, to nearest. Products are summed in FP16 1-6-9 in chunks, see :func:`chunked_matmul`: a long sum in 16 bits
      swamps its small terms, a sum of short sums does not.
    - After each optimizer step every parameter that had a gradient is rounded to FP16 1-6-9, stochastically, and so is
      SGD's momentum. The arithmetic between is the optimizer's, and so are other optimizers' states: Adam's second
      moments are squares that this format would flush to zero.
    - Gradients are scaled by ``loss_scale`` before they are rounded, and products are divided by it. As nothing else
      rounds to few bits, that is the same as a scaled loss: but the loss, the gradients and what clips them are
      unscaled all the same.

    No hardware has these formats: they are emulated, to the bit, at a small fraction of the base plugin's speed. This is
    for studying the method on small models. Between forward and backward a map holds one byte for each element of its
    input and of its weight.

    Args:
        chunk: products in a chunk, the paper's CL, >= 1. 1 is plain accumulation in FP16.
        base: the precision of all else: "32-true" or "bf16-mixed", or another Precision plugin that leaves parameters in
            float32 and does not scale the loss.
        loss_scale: a positive number by which gradients are scaled, the paper's 1000. Elements of a gradient beyond
            ``57344 / loss_scale`` are clamped to it.
        accumulate: "exact" as in the paper; "float32" sums within a chunk in float32 and only rounds the chunks' sums,
            which is many times as fast, and more exact than the paper's.
        skip: linear maps that stay as they are: "head" for those outside the blocks, and dotted paths. Their weights
            are in FP16 1-6-9 all the same.

    Raises:
        ValueError: if an argument is out of range, or the base scales the loss; at setup, if no linear map is left, or
            a parameter is not float32.
        TypeError: if an argument is of another type.
    """

    saves: ClassVar[str] = "nothing in time: emulated; 1 byte an element saved"
    paper: ClassVar[str] = "Wang et al. 2018, arXiv:1812.08011"
    constraints: ClassVar[str] = "emulated, very slow: for study; float32 parameters"
    survey: ClassVar[Survey | None] = Survey("FP8 training", zhuang="3", shen="4.2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        pointless=lambda profile: "an emulation, for study: very slow"
    )

    def __init__(
        self,
        chunk: int = 64,
        base: str | Precision = "32-true",
        *,
        loss_scale: float = 1000.0,
        accumulate: Accumulate = "exact",
        skip: Collection[str] = ("head",),
    ) -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"Wang2018FP8Precision({chunk=}): expected a whole number >= 1; the paper has 64.")
        if not 0 < loss_scale < float("inf"):
            raise ValueError(f"Wang2018FP8Precision({loss_scale=}): expected a positive number; the paper has 1000.")
        if accumulate not in get_args(Accumulate):
            raise ValueError(
                f"Wang2018FP8Precision({accumulate=}): expected one of {', '.join(map(repr, get_args(Accumulate)))}."
            )
        super().__init__(base, skip=skip)
        if self.scaler is not None:
            raise ValueError(
                f"Wang2018FP8Precision(base of {type(self.inner).__name__}): got a plugin that scales the loss itself;"
                " expected one that does not, since FP8 would clamp gradients that are scaled twice. Take base='32-true'"
                " or 'bf16-mixed'."
            )
        self.chunk, self.loss_scale = chunk, float(loss_scale)
        self.accumulate: Accumulate = accumulate

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return chunked_matmul(a, b, self.chunk, self.accumulate)

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        return by_rows(lambda x, weight, bias: _Wang2018Linear.apply(x, weight, bias, self._matmul, self.loss_scale))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = super().convert_module(module)
        for name, p in module.named_parameters():
            if p.is_floating_point() and p.dtype != torch.float32:
                self._patches.restore()
                raise ValueError(
                    f"Wang2018FP8Precision: the parameter {name} is {p.dtype}; expected torch.float32, which holds the"
                    " numbers of FP16 1-6-9. Take base='32-true' or 'bf16-mixed'."
                )
        return module

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._round_weights(optimizer)
        return result

    @torch.no_grad()
    def _round_weights(self, optimizer: Any) -> None:
        """The same numbers are drawn on all ranks, so that their weights stay alike."""
        self.seed()  # the run's seed is agreed upon
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
        return f"{FP8_152.name} with sums in {sums} by chunks of {self.chunk}, and all weights in {FP16_169.name} (emulated)"
