"""A linear map by some of its rows or columns is what slicing makes of it, in value and in every gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_eff.model.growth._ffn.products import narrow_linear

UNITS = 3


def inputs(dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out, into = (8, 5) if dim == 0 else (5, 8)
    sizes = [(2, 4, into if dim == 0 else UNITS), (out, into), (UNITS if dim == 0 else out,)]
    x, weight, bias = (torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_value_and_gradients_are_those_of_a_slice(dim: int, with_bias: bool) -> None:
    x, weight, bias = inputs(dim)
    wanted_of = (x, weight, *([bias] if with_bias else []))
    b = bias if with_bias else None
    made = narrow_linear(x, weight, b, dim, UNITS)
    reference = F.linear(x, weight.narrow(dim, 0, UNITS), b)
    assert made.grad_fn is not None and "NarrowProduct" in made.grad_fn.name()
    torch.testing.assert_close(made, reference, rtol=0, atol=0)
    got = torch.autograd.grad(made.sin().sum(), wanted_of)
    wanted = torch.autograd.grad(reference.sin().sum(), wanted_of)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    assert got[1].narrow(dim, UNITS, 8 - UNITS).count_nonzero() == 0


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_gradients(dim: int) -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return narrow_linear(x, weight, bias, dim, UNITS)

    assert torch.autograd.gradcheck(product, inputs(dim))
    assert torch.autograd.gradgradcheck(product, inputs(dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_frozen_weight_or_bias_takes_no_gradient(dim: int) -> None:
    x, weight, bias = inputs(dim)
    narrow_linear(x, weight.detach(), bias, dim, UNITS).sum().backward()
    assert x.grad is not None and bias.grad is not None
    narrow_linear(x.detach(), weight, bias.detach(), dim, UNITS).sum().backward()
    assert weight.grad is not None


def test_autocast_takes_its_own_precision() -> None:
    x, weight, bias = inputs(0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = narrow_linear(x, weight, bias, 0, UNITS)
    assert made.dtype == torch.bfloat16
