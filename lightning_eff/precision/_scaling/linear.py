"""A linear layer on float8 operands, forward and backward.

With ``x`` (M, K), ``W`` (N, K) and the gradient ``g`` (M, N) of ``y = x W^T``, three products run in float8:

    y = x W^T,    dx = g W,    dW = g^T x.

``x`` and ``W`` are E4M3 and ``g`` is E5M2 (Micikevicius et al. 2022, arXiv:2209.05433). Each operand is cast for its
product, with scales along that product's contraction. Between forward and backward, the layer saves ``x`` in float8 as dW
needs it (one byte per element, and the scales). It saves ``W`` either in float8 as dx needs it, or as it is, to cast it again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_eff.precision._scaling.casts import Codes, Pair, Scaling, cast_pair
from lightning_eff.precision._scaling.history import AmaxHistory
from lightning_eff.precision._scaling.products import Product

DTYPES = {"x": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "gradient": torch.float8_e5m2}


class Float8Linear:
    """``f(x, weight, bias)``, see :data:`lightning_eff.precision._linear.products.Arithmetic`.

    Args:
        path: the path of the layer, for the history.
        scaling: see :func:`.casts.cast_pair`.
        product: the backend.
        fast: whether the forward product accumulates in fewer bits.
        fast_backward: whether the backward products do.
        keep_weight: keep the weight's float8 codes for dx, one byte per element, instead of casting the weight again.
        history: the history for delayed scaling, or None.
        recording: a function that returns whether the current backward pass records its amax, and that of its forward pass,
            in the history.
    """

    def __init__(
        self,
        path: str,
        scaling: Scaling,
        product: Product,
        *,
        fast: bool,
        history: AmaxHistory | None,
        recording: Callable[[], bool],
        fast_backward: bool = False,
        keep_weight: bool = True,
    ) -> None:
        self.path = path
        self.scaling: Scaling = scaling
        self.product = product
        self.fast = fast
        self.fast_backward = fast_backward
        self.keep_weight = keep_weight
        self.history = history
        self.recording = recording

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        empty = rows.shape[0] == 0  # has no amax
        y: Any = (
            rows @ weight.to(x.dtype).t() if empty else _Products.apply(rows, weight, self, torch.is_grad_enabled())
        )
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias.to(y.dtype)

    def cast(
        self, x: Tensor, role: str, *, rows: bool, columns: bool, others: Sequence[Tensor] | None = None
    ) -> tuple[Pair, Tensor | None]:
        """Cast an operand, with the history's scale if there is one; then also return its amax.

        Args:
            x: (R, K).
            role: which operand it is.
            rows: whether to return (R, K).
            columns: whether to return the transposed matrix.
            others: the amax to record together with this one, see :meth:`.AmaxHistory.peak`.
        """
        peak = None if self.history is None else self.history.peak(self.path, role, others)
        square = role == "weight"
        pair = cast_pair(x, DTYPES[role], self.scaling, rows=rows, columns=columns, square=square, peak=peak)
        return pair, None if peak is None else pair.amax


class _Products(torch.autograd.Function):
    """``x W^T``; the backward pass disables autocast."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: Float8Linear, grad_enabled: bool) -> Tensor:
        needs_x, needs_weight, *_ = (grad_enabled and needed for needed in ctx.needs_input_grad)
        keep = needs_x and linear.keep_weight
        x8, amax_x = linear.cast(x, "x", rows=True, columns=needs_weight)
        weight8, amax_weight = linear.cast(weight, "weight", rows=True, columns=keep)
        assert x8.rows is not None and weight8.rows is not None
        of_x, of_weight = (pair.columns or (None, None) for pair in (x8, weight8))
        whole = (weight, weight8.scale) if needs_x and not keep else (None, None)
        ctx.save_for_backward(*of_x, *of_weight, *whole, amax_x, amax_weight)
        ctx.linear, ctx.dtypes = linear, (x.dtype, weight.dtype)
        return linear.product(x8.rows, weight8.rows, x.dtype, linear.fast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        codes, inverse, of_weight, weight_inverse, weight, scale, *amax = ctx.saved_tensors
        linear: Float8Linear = ctx.linear
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = dw = None
        with torch.autocast(g.device.type, enabled=False):
            others = amax if linear.history is not None and linear.recording() else None
            g8, _ = linear.cast(g, "gradient", rows=needs_x, columns=needs_weight, others=others)
            if needs_x:
                weight8 = Codes(of_weight, weight_inverse) if weight is None else recast(weight, scale, linear)
                assert g8.rows is not None
                dx = linear.product(g8.rows, weight8, ctx.dtypes[0], linear.fast_backward)
            if needs_weight:
                assert g8.columns is not None
                dw = linear.product(g8.columns, Codes(codes, inverse), ctx.dtypes[1], linear.fast_backward)
        return dx, dw, None, None


def recast(weight: Tensor, scale: Tensor | None, linear: Float8Linear) -> Codes:
    """Return the transposed weight's codes, the same bits as in the forward pass."""
    pair = cast_pair(weight, DTYPES["weight"], linear.scaling, rows=False, columns=True, square=True, scale=scale)
    assert pair.columns is not None
    return pair.columns
