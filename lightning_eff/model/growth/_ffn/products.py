"""A linear layer that uses some of its rows or columns and writes the gradient of its weight in place.

Autograd differentiates a slice of a weight by creating zeros in the full shape and copying the slice's gradient into
them, which takes a few percent of a step. Here the product is written into its place, and only the absent part is
zeroed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from typing_extensions import override


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, units: int) -> Tensor:
    """Return ``x @ w.T + bias``, where ``w`` is the first ``units`` of ``weight`` along ``dim``.

    Args:
        x: (..., in), with the input size of ``w``.
        weight: (out, in), whole. Its gradient has the same shape and is zero behind the first ``units``.
        bias: as long as ``w`` has rows, or None.
        dim: 0 for rows, 1 for columns.
        units: from 1 to ``weight.shape[dim]``.
    """
    plain = torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active()
    if plain or not weight.requires_grad or x.dtype != weight.dtype:
        return F.linear(x, weight.narrow(dim, 0, units), bias)
    y = _NarrowProduct.apply(x, weight, bias, dim, units)
    assert isinstance(y, Tensor)
    return y


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: FunctionCtx, *args: Any) -> Tensor:
        x, weight, bias, dim, units = args
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.units = dim, units  # pyright: ignore[reportAttributeAccessIssue]
        return F.linear(x, weight.narrow(dim, 0, units), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, weight = ctx.saved_tensors
        dim, units = ctx.dim, ctx.units
        dx = g @ weight.narrow(dim, 0, units) if ctx.needs_input_grad[0] else None
        db = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, db, None, None
        rows, columns = g.flatten(0, -2).mT, x.flatten(0, -2)
        absent = weight.shape[dim] - units
        if torch.is_grad_enabled():  # a second derivative is needed
            pad = (0, absent) if dim else (0, 0, 0, absent)
            return dx, F.pad(rows @ columns, pad), db, None, None
        dw = torch.empty_like(weight)
        torch.mm(rows, columns, out=dw.narrow(dim, 0, units))
        dw.narrow(dim, units, absent).zero_()
        return dx, dw, db, None, None
