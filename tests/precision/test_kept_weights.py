"""Codes of a weight live from a forward pass to its backward pass, so no later change of the weight meets old codes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff import FP8Precision, INT8Precision

KINDS: dict[str, Callable[[], Any]] = {
    "fp8": lambda: FP8Precision(backend="emulated", skip=(), keep_weight=True),
    "fp8 blockwise": lambda: FP8Precision("blockwise", backend="emulated", skip=(), keep_weight=True),
    "int8": lambda: INT8Precision(stochastic_rounding=False, skip=()),
    "dorefa": lambda: INT8Precision(rule="dorefa", weight_bits=4, activation_bits=8, gradient_bits=32, skip=()),
}


def step(net: nn.Linear) -> None:
    torch.optim.SGD(net.parameters(), 10.0).step()


def load(net: nn.Linear) -> None:
    net.load_state_dict({name: value.flip(1) for name, value in net.state_dict().items()})


def load_by_assignment(net: nn.Linear) -> None:
    net.load_state_dict({name: value.flip(1) for name, value in net.state_dict().items()}, assign=True)


def data(net: nn.Linear) -> None:
    net.weight.data = net.weight.data.flip(1)


def swap(net: nn.Linear) -> None:
    """As averages do: the values change places with others."""
    other = net.weight.detach().flip(1).clone()
    net.weight.data.copy_(other)


@torch.no_grad()
def in_place(net: nn.Linear) -> None:
    net.weight[3] *= -2


def of(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    net.zero_grad()
    own = x.clone().requires_grad_()
    y = net(own)
    y.backward(torch.ones_like(y))
    assert own.grad is not None
    return y.detach(), own.grad


def converted(net: nn.Module, kind: str) -> Any:
    plugin = KINDS[kind]()
    plugin.convert_module(net)
    return plugin


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("change", [step, load, load_by_assignment, data, swap, in_place])
def test_codes_are_those_of_the_present_weight(kind: str, change: Callable[[nn.Linear], None]) -> None:
    torch.manual_seed(0)
    x, net = torch.rand(8, 32), nn.Sequential(nn.Linear(32, 16, bias=False))
    plugin = converted(net, kind)
    before = of(net, x)
    change(net[0])  # type: ignore[arg-type]
    fresh = nn.Sequential(nn.Linear(32, 16, bias=False))
    fresh[0].weight = nn.Parameter(net[0].weight.detach().clone())  # type: ignore[union-attr]
    other = converted(fresh, kind)
    found, expected = of(net, x), of(fresh, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], before[0]) and not torch.equal(found[1], before[1])
    for one in (plugin, other):
        one.teardown()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_backward_pass_uses_the_weight_of_its_own_forward_pass(kind: str) -> None:
    """Two forward passes with different weights, and then their backward passes."""
    torch.manual_seed(0)
    x, net = torch.rand(8, 32), nn.Sequential(nn.Linear(32, 16, bias=False))
    plugin = converted(net, kind)
    expected = of(net, x)[1]
    own = x.clone().requires_grad_()
    y = net(own)
    data(net[0])  # type: ignore[arg-type]
    net(x.clone().requires_grad_())
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(own.grad, expected, rtol=0, atol=0)
    plugin.teardown()
