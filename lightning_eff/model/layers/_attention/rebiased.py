"""Layers that lose their bias or part of it, or receive a bias from another layer."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap


class RebiasedLinear(nn.Linear):
    """An ``nn.Linear`` with the plain layer's weight and another bias, or none.

    Args:
        plain: the linear layer.
        bias: the initial bias, shape (out,), or None.
    """

    def __init__(self, plain: nn.Linear, bias: Tensor | None) -> None:
        super().__init__(plain.in_features, plain.out_features, bias is not None, device="meta")
        self.weight = plain.weight
        self.bias = None if bias is None else nn.Parameter(bias.clone())  # pyright: ignore[reportAttributeAccessIssue]

    def fold(self) -> Mapping[str, Tensor]:
        """The weight, and a bias of zeros if there is none."""
        bias = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
        return {"weight": self.weight, "bias": bias}


class UnbiasedConv1D(nn.Module):
    """Hugging Face's ``Conv1D``, ``x W``, with the plain layer's weight (in, out) and no bias.

    Args:
        m: the linear layer.
    """

    def __init__(self, m: LinearMap) -> None:
        super().__init__()
        weight = m.module.weight
        assert isinstance(weight, nn.Parameter)
        self.weight, self.bias, self.nx, self.nf = weight, None, m.in_features, m.out_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)

    def fold(self) -> Mapping[str, Tensor]:
        """The weight, and a bias of zeros."""
        return {"weight": self.weight, "bias": self.weight.new_zeros(self.nf)}

    @override
    def extra_repr(self) -> str:
        return f"nx={self.nx}, nf={self.nf}"


class UnbiasedLayerNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` with the plain norm's gain and no bias.

    Args:
        plain: the norm.
    """

    def __init__(self, plain: nn.LayerNorm) -> None:
        super().__init__(list(plain.normalized_shape), plain.eps, bias=False, device="meta")
        self.weight = plain.weight

    def fold(self) -> Mapping[str, Tensor]:
        """The gain, and a bias of zeros."""
        return {"weight": self.weight, "bias": torch.zeros_like(self.weight)}


class PartlyBiased(nn.Module):
    """``W x + b`` with b fixed to zero for some outputs, which have no bias parameters.

    Args:
        m: the plain linear layer.
        bias: the initial bias, shape (out,).
        kept: a mask of shape (out,) of the outputs with a bias.
    """

    index: Tensor

    def __init__(self, m: LinearMap, bias: Tensor, kept: Tensor) -> None:
        super().__init__()
        weight = m.module.weight
        assert isinstance(weight, nn.Parameter)
        self.weight, self.transposed, self.out_features = weight, m.transposed, m.out_features
        self.register_buffer("index", kept.nonzero().flatten().to(bias.device), persistent=False)
        self.bias_left = nn.Parameter(bias.index_select(0, self.index))

    @property
    def bias(self) -> Tensor:
        """The whole bias, (out,), zero where there is no parameter."""
        whole = self.bias_left.new_zeros(self.out_features)
        return whole.index_copy(0, self.index, self.bias_left)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)

    def fold(self) -> Mapping[str, Tensor]:
        """The weight, and the whole bias."""
        return {"weight": self.weight, "bias": self.bias}

    @override
    def extra_repr(self) -> str:
        return f"out_features={self.out_features}, biases={self.bias_left.numel()}"


def rebiased(m: LinearMap, bias: Tensor, kept: Tensor) -> nn.Module:
    """The layer with ``bias`` where ``kept`` is set and no bias elsewhere; both have shape (out,)."""
    if m.transposed and not bool(kept.any()):
        return UnbiasedConv1D(m)
    if type(m.module) is nn.Linear and (bool(kept.all()) or not bool(kept.any())):
        return RebiasedLinear(m.module, bias if bool(kept.all()) else None)
    return PartlyBiased(m, bias, kept)


def moved(m: LinearMap, values: Tensor) -> Tensor:
    """``b + W c``: the bias of an output layer that makes up for values without their biases c.

    Args:
        m: the output layer.
        values: c, the biases of the values, of shape (in,).
    """
    weight, bias = m.module.weight, m.module.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    w = weight.t() if m.transposed else weight
    double = torch.float64
    return (bias.to(double) + w.to(double) @ values.to(double)).to(bias.dtype)
