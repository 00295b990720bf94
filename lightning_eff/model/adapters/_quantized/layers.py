"""A frozen linear layer whose weight is kept in few bits."""

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._architecture.record import FROZEN
from lightning_eff.model.adapters._partial import STILL
from lightning_eff.model.adapters._quantized.rounding import Product, dequantized, quantized


class QuantizedLinear(nn.Module):
    """``x W^T + b`` with W in ``bits`` bits, and gradients for x and b only.

    Args:
        plain: the linear layer, whose weight is rounded and whose bias is reused.

    Attributes:
        bits: 4 or 8.
        shape: the shape of W, (N, K).
        transposed: whether the plain layer's weight is ``W^T``.
        dtype: the dtype of the plain layer's weight; it changes when the module is cast.
    """

    def __init__(self, plain: LinearMap, bits: int) -> None:
        super().__init__()
        weight = cast(Tensor, plain.module.weight)
        self.bits, self.transposed, self.dtype = bits, plain.transposed, weight.dtype
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.shape = (plain.out_features, plain.in_features)
        self.register_parameter("bias", cast("nn.Parameter | None", plain.module.bias))
        stored = quantized(weight.T if plain.transposed else weight, bits)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.names = tuple(stored)
        self.__dict__[STILL] = self.names
        if self.bias is not None and "bias" in plain.module.__dict__.get(FROZEN, ()):
            self.__dict__[FROZEN] = ["bias"]

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """The tensors that represent W."""
        return {name: cast(Tensor, self._buffers[name]) for name in self.names}

    @property
    def weight(self) -> Tensor:
        """The rounded weight in the plain layer's layout, computed at each access."""
        made = dequantized(self.stored, self.bits, self.shape, self.dtype)
        return made.T.contiguous() if self.transposed else made

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Torch's own; the dtype of the computed weight follows, as with ``module.to(torch.bfloat16)``."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    @override
    def forward(self, x: Tensor) -> Tensor:
        stored = self.stored
        return cast(Tensor, Product.apply(x, self.bias, self.bits, self.shape, tuple(stored), *stored.values()))

    @override
    def extra_repr(self) -> str:
        kept = "NF4" if self.bits == 4 else "int8"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, weight in {kept}"


def plain_tensors(layer: QuantizedLinear) -> dict[str, Tensor]:
    """The rounded weight and the bias, in the plain layer's layout."""
    with torch.no_grad():
        found = {"weight": layer.weight}
    return found if layer.bias is None else {**found, "bias": cast(Tensor, layer.bias)}
