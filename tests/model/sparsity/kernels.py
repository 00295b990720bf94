"""Stand-ins for torch's sparse kernels on a CPU: they unpack the packed weight and multiply densely."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from lightning_eff.model.sparsity._kernels import blocks, products, two_of_four


def packed_by_hand(w: Tensor) -> tuple[Tensor, Tensor]:
    """The first two elements that are not zero of each aligned four in a row, and their places; a third one is an error."""
    four = w.unflatten(-1, (-1, 4))
    assert int((four != 0).sum(-1).max()) <= 2, "kernels would leave out a third element"
    places = (four != 0).int().argsort(dim=-1, descending=True, stable=True)[..., :2]
    return four.gather(-1, places), places


def unpacked_by_hand(values: Tensor, places: Tensor) -> Tensor:
    return values.new_zeros(*values.shape[:-1], 4).scatter_(-1, places, values).flatten(-2)


def packed_by_torch(w: Tensor) -> tuple[Tensor, Tensor]:
    """As torch packs for CUTLASS, in Python."""
    packed_by_hand(w)
    return sparse_semi_structured_from_dense_cutlass(w)


class TwoOfFourOnACPU:
    """2:4 kernels in half precision, packed by torch, or in float64, packed by hand.

    Attributes:
        calls: the number of products.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, exact: bool = False) -> None:
        self.calls, self.exact = 0, exact
        monkeypatch.setattr(two_of_four, "unavailable", lambda device: None)
        monkeypatch.setattr(two_of_four, "compress", packed_by_hand if exact else packed_by_torch)
        monkeypatch.setattr(two_of_four, "multiply", self.multiply)
        if exact:
            monkeypatch.setattr(products, "_HALF", (torch.float64,))
            misfit = two_of_four.misfit
            monkeypatch.setattr(two_of_four, "misfit", lambda shape, dtype: misfit(shape, torch.bfloat16))

    def multiply(self, packed: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        assert x.is_contiguous() and len(x) % 8 == 0, "cuSPARSELt needs both"
        self.calls += 1
        w = unpacked_by_hand(*packed) if self.exact else sparse_semi_structured_to_dense_cutlass(*packed)
        assert bias is None or bias.dtype == x.dtype == w.dtype
        return F.linear(x, w, bias)


class BlocksOnACPU:
    """Block-sparse kernels in half precision, or in float64.

    Attributes:
        calls: the number of products.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, exact: bool = False) -> None:
        self.calls = 0
        monkeypatch.setattr(blocks, "unavailable", lambda device: None)
        monkeypatch.setattr(blocks, "multiply", self.multiply)
        if exact:
            monkeypatch.setattr(products, "_HALF", (torch.float64,))

    def multiply(self, bsr: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        assert x.is_contiguous() and len(x) % bsr.values().shape[1] == 0, "torch's kernel needs both"
        self.calls += 1
        return F.linear(x, bsr.to_dense(), bias)
