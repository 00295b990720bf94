"""One autograd function for the linear layers of all number formats, whose three products a format computes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Arithmetic = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``f(x, weight, bias)`` is ``x weight^T + bias``, of shape (..., N), for ``x`` (..., K) and ``weight`` (N, K)."""


class Products(ABC):
    """The products of a linear layer in one number format, in the forward and the backward pass."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return ``x weight^T`` and the tensors that the backward pass needs.

        Args:
            x: (B, K), float32.
            weight: (N, K), float32.
        """

    @abstractmethod
    def backward(
        self, saved: tuple[Tensor, ...], g: Tensor, *, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of ``x`` and ``weight``, each None if it is not needed.

        Args:
            saved: the tensors that :meth:`forward` returned.
            g: the gradient of the product, (B, N), float32.
            needs_x: whether the gradient of ``x`` is needed.
            needs_weight: whether the gradient of ``weight`` is needed.
        """


def linear_in(products: Products) -> Arithmetic:
    """Return the linear layer that computes with ``products``, for inputs with any leading dimensions.

    The view is made outside the autograd Function, because the views of a Function must not be changed in place
    (``nn.ReLU(inplace=True)``).
    """

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Any = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, products)
        return y.view(*x.shape[:-1], weight.shape[0])

    return compute


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        y, saved = products.forward(x.float(), weight.float())
        ctx.save_for_backward(*saved)
        ctx.products = products
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- one result, one gradient
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x, of_weight, of_bias = ctx.dtypes
        with torch.autocast(g.device.type, enabled=False):
            g = g.float()
            dx, dw = ctx.products.backward(ctx.saved_tensors, g, needs_x=needs_x, needs_weight=needs_weight)
            db = g.sum(0).to(of_bias) if needs_bias else None
        return None if dx is None else dx.to(of_x), None if dw is None else dw.to(of_weight), db, None
