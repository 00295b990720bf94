"""What follows from a norm's or an activation's saved input needs no codes: which, how exactly, and when not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.kernels.group_quantization import dequantize, quantize
from lightning_eff.memory._compression.engine import Engine

ROWS, DIM = 64, 32
SIZE = ROWS * DIM


class Net(nn.Module):
    """Something, and a linear map behind it."""

    def __init__(self, first: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.linear, self.first = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), first
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.first(x))


def run(
    net: Net, *, curved: bool = False, bits: Any = 4, stochastic: bool = False, seed: int = 0
) -> tuple[Tensor, Engine]:
    """The gradient of the linear map's weight, and the engine."""
    engine = Engine(net, bits=bits, stochastic=stochastic)
    engine.tensors.derivations.curved = curved
    net.zero_grad()
    with engine.forward(seed, ()):
        y = net(given())
    y.backward(upstream().view_as(y))
    assert net.linear.weight.grad is not None
    return net.linear.weight.grad, engine


def given() -> Tensor:
    return torch.randn(4, ROWS // 4, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0


def upstream() -> Tensor:
    return torch.randn(4, ROWS // 4, DIM, generator=torch.Generator().manual_seed(1))


def held(engine: Engine, category: str) -> int:
    return engine.ledger.by_category[category]


def product(x: Tensor) -> Tensor:
    return upstream().flatten(0, 1).T @ x.flatten(0, 1)


def test_behind_a_norm() -> None:
    """``dW = dy^T ((x^ - mean) rstd weight + bias)``, with mean and rstd those of ``x`` itself."""
    net = Net(lambda x: net.norm(x))
    grad, engine = run(net)
    assert held(engine, "linear") == 0 and held(engine, "norm") == SIZE // 2 + SIZE // 256 * 8
    assert engine.ledger.exact_bytes == 2 * 4 * SIZE + 2 * 4 * ROWS and engine.ledger.bits == 2.0
    x, norm = given().detach(), net.norm
    decoded = dequantize(quantize(x, 4, 256))
    rstd = (x.var(dim=-1, keepdim=True, correction=0) + norm.eps).rsqrt()
    rounded = (decoded - x.mean(dim=-1, keepdim=True)) * rstd * norm.weight + norm.bias
    torch.testing.assert_close(grad, product(rounded.detach()), rtol=1e-5, atol=1e-4)


def test_behind_a_norm_the_gradient_is_unbiased() -> None:
    """At 2 bits, over 200 passes: as far from the exact gradient as ``V / 200`` makes it."""
    net, num = Net(lambda x: net.norm(x)), 200
    found = torch.stack([run(net, bits=2, stochastic=True, seed=seed)[0].clone() for seed in range(num)])
    exact = product(net.norm(given()).detach())
    distance, variance = float((found.mean(dim=0) - exact).square().sum()), float(found.var(dim=0).sum())
    assert 0.8 * variance / num < distance < 1.25 * variance / num


@pytest.mark.parametrize("function", [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu])
def test_behind_an_activation_where_curved_functions_are_asked_for(function: Callable[[Tensor], Tensor]) -> None:
    grad, engine = run(Net(function))
    codes = SIZE // 2 + SIZE // 256 * 8
    assert (held(engine, "linear"), held(engine, "activation")) == (codes, codes)
    torch.testing.assert_close(grad, product(dequantize(quantize(function(given()).detach(), 4, 256))))
    grad, engine = run(Net(function), curved=True)
    assert (held(engine, "linear"), held(engine, "activation")) == (0, codes)
    torch.testing.assert_close(grad, product(function(dequantize(quantize(given().detach(), 4, 256)))))


def _in_place(x: Tensor) -> Tensor:
    return F.silu(x).mul_(3.0)


@pytest.mark.parametrize(
    "first",
    [
        _in_place,
        lambda x: F.silu(x).transpose(-1, -2).contiguous().view(4, -1, DIM),
        lambda x: F.silu(x).bfloat16().float(),
        lambda x: F.silu(x) + 1,
    ],
    ids=["changed in place", "in another order", "rounded on the way", "another tensor"],
)
def test_what_is_another_tensor_has_codes_of_its_own(first: Callable[[Tensor], Tensor]) -> None:
    grad, engine = run(Net(first), curved=True)
    assert held(engine, "linear") == SIZE // 2 + SIZE // 256 * 8
    torch.testing.assert_close(grad, product(dequantize(quantize(first(given()).detach(), 4, 256))))


def test_the_codes_must_have_the_bits_that_are_asked_for() -> None:
    """The head's input has 8 bits; those of a norm's input are 2."""
    blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
    net = Net(lambda x: net.norm(blocks[1](blocks[0](x))))
    net.blocks = blocks
    for norm_bits, linear in ((2, SIZE + SIZE // 256 * 8), (8, 0)):
        _, engine = run(net, bits=lambda key, wide: norm_bits if "norm" in key else 8)  # noqa: B023
        two = 2 * (SIZE + SIZE // 256 * 8)  # of the blocks' inputs, at 8 bits
        assert held(engine, "linear") == two + linear


def test_a_line_of_what_follows_from_codes_is_no_line_of_these() -> None:
    """``2 silu(x)`` has codes of its own, also where ``silu(x)`` is held in those of ``x``."""
    other = nn.Linear(DIM, DIM)

    also: list[Tensor] = []

    def line(x: Tensor) -> Tensor:
        y = F.silu(x.flatten(0, 1))  # of two dimensions, as linear maps save it
        also.append(other(y))
        return 2 * y

    grad, engine = run(Net(line), curved=True)
    assert held(engine, "linear") == SIZE // 2 + SIZE // 256 * 8
    torch.testing.assert_close(grad, product(dequantize(quantize(2 * F.silu(given().detach()), 4, 256))))
