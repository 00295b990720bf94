"""Modules that compute with two factors where a plain module has one weight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_eff.model.layers._low_rank.factors import at_least_single


class Factored(nn.Module):
    """Two plain modules in sequence, ``first`` and then ``second``; loading a checkpoint may change their rank.

    ``weight`` is the plain module's weight, computed from the factors at each access. ``bias`` is its own.

    Attributes:
        first: from the inputs to r channels, without bias.
        second: from the r channels to the outputs, with the plain module's bias.
    """

    first: nn.Module
    second: nn.Module

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    @property
    def rank(self) -> int:
        """r, the number of channels between the two modules."""
        weight = self.first.weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]

    @property
    def weight(self) -> Tensor:
        """The plain module's weight, as the product of the factors."""
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        """The plain module's bias."""
        bias = self.second.bias
        return bias if isinstance(bias, Tensor) else None

    def begin(self, left: Tensor, right: Tensor) -> None:
        """Copy the factors of :func:`factors`, given as matrices."""
        with torch.no_grad():
            for m, matrix in ((self.first, right), (self.second, left)):
                assert isinstance(m.weight, Tensor)
                m.weight.copy_(self.as_weight(m, matrix))

    def as_weight(self, m: nn.Module, matrix: Tensor) -> Tensor:
        """A factor in the shape of the weight of ``m``."""
        return matrix

    def fold(self) -> Mapping[str, Tensor]:
        """The product in the plain weight's layout, and the bias."""
        found = {"weight": self.weight}
        return found if self.bias is None else {**found, "bias": self.bias}

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Resize to the checkpoint's rank first: another run's initial weights may have given another."""
        saved = state_dict.get(f"{prefix}first.weight")
        if isinstance(saved, Tensor) and saved.ndim > 1 and saved.shape[0] != self.rank:
            self.resize(saved.shape[0])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def resize(self, rank: int) -> None:
        """Make room for factors of another rank; the parameters stay the same objects."""
        for m, dim in ((self.first, 0), (self.second, 1)):
            p = m.weight
            if not isinstance(p, nn.Parameter) or isinstance(p, DTensor):
                return
            p.data = p.data.new_zeros([rank if d == dim else size for d, size in enumerate(p.shape)])
        for m, names in ((self.first, ("out_features", "out_channels")), (self.second, ("in_features", "in_channels"))):
            for name in names:
                if hasattr(m, name):
                    setattr(m, name, rank)


class FactoredLinear(Factored):
    """``A (B x) + b`` instead of ``W x + b``, with A of shape (out, r) and B of shape (r, in).

    Args:
        in_features: K.
        out_features: N.
        rank: r.
        transposed: whether the plain weight has shape (K, N) instead of (N, K).
        plain: the plain module, whose bias becomes this module's parameter.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, *, transposed: bool, plain: nn.Module) -> None:
        super().__init__()
        bias = plain.bias
        self.in_features, self.out_features, self.transposed = in_features, out_features, transposed
        self.first = nn.Linear(in_features, rank, bias=False)
        self.second = nn.Linear(rank, out_features, bias=bias is not None)
        if isinstance(bias, nn.Parameter):
            self.second.bias = bias

    @property
    @override
    def weight(self) -> Tensor:
        assert isinstance(self.first.weight, Tensor) and isinstance(self.second.weight, Tensor)
        left, right = self.second.weight, self.first.weight
        product = (at_least_single(left) @ at_least_single(right)).to(left.dtype)
        return product.t() if self.transposed else product

    @override
    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}"


class FactoredConv2d(Factored):
    """A vertical convolution followed by a horizontal one (Tai et al. 2015): ``W_nc(y, x) = sum_k H_nk(x) V_kc(y)``.

    Args:
        plain: the convolution, with one group; its bias becomes this module's parameter.
        rank: the number of channels between the two.
    """

    def __init__(self, plain: nn.Conv2d, rank: int) -> None:
        super().__init__()
        (ky, kx), (sy, sx), (dy, dx) = plain.kernel_size, plain.stride, plain.dilation
        pad: Any = plain.padding
        pads = (pad, pad) if isinstance(pad, str) else ((pad[0], 0), (0, pad[1]))
        mode: Any = plain.padding_mode
        self.first = nn.Conv2d(
            plain.in_channels, rank, (ky, 1), (sy, 1), pads[0], (dy, 1), bias=False, padding_mode=mode
        )
        self.second = nn.Conv2d(
            rank, plain.out_channels, (1, kx), (1, sx), pads[1], (1, dx), bias=plain.bias is not None, padding_mode=mode
        )
        if plain.bias is not None:
            self.second.bias = plain.bias

    @override
    def as_weight(self, m: nn.Module, matrix: Tensor) -> Tensor:
        assert isinstance(m.weight, Tensor)
        if m is self.first:  # (r, C ky) -> (r, C, ky, 1)
            return matrix.view(m.weight.shape)
        n, r, _, kx = m.weight.shape  # (N kx, r) -> (N, r, 1, kx)
        return matrix.view(n, kx, r).transpose(1, 2).unsqueeze(2)

    @property
    @override
    def weight(self) -> Tensor:
        vertical, horizontal = self.first.weight, self.second.weight
        assert isinstance(vertical, Tensor) and isinstance(horizontal, Tensor)
        h, v = at_least_single(horizontal).squeeze(2), at_least_single(vertical).squeeze(3)
        return torch.einsum("nkx,kcy->ncyx", h, v).to(vertical.dtype)

    @override
    def extra_repr(self) -> str:
        return f"rank={self.rank}"


def conv_matrix(weight: Tensor) -> Tensor:
    """A convolution's weight (N, C, ky, kx) as the matrix (N kx, C ky) that the two convolutions factor."""
    n, c, ky, kx = weight.shape
    return weight.permute(0, 3, 1, 2).reshape(n * kx, c * ky)
