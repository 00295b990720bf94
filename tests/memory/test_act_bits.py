"""Which tensor gets how many bits: the allocation against a search of all, the sensitivities against measured errors."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.memory._compression.bits import (
    CHOICES,
    Allocation,
    Statistics,
    allocate,
    divide,
    is_direct,
    kinds,
    step_error,
)
from lightning_eff.memory._compression.engine import Engine


def total(sensitivity: dict[str, float], bits: dict[str, int]) -> float:
    return sum(c * step_error(bits[name]) for name, c in sensitivity.items())


def average(numel: dict[str, int], bits: dict[str, int]) -> float:
    return sum(numel[name] * b for name, b in bits.items()) / sum(numel[name] for name in bits)


def test_step_error() -> None:
    assert [step_error(b) for b in (1, 2, 4, 8)] == [1.0, 1 / 9, 1 / 225, 1 / 65025]


@pytest.mark.parametrize("seed", range(6))
def test_allocation_is_the_best_for_the_average_it_takes(seed: int) -> None:
    """Against all 5^6 allocations: none that takes no more bits has a smaller error."""
    draw = random.Random(seed)
    names = [f"t{i}" for i in range(6)]
    sensitivity = {name: 10 ** draw.uniform(-4, 4) for name in names}
    numel = {name: draw.choice([1, 1, 4, 8]) * 256 for name in names}
    budget = draw.uniform(1.1, 7.5)
    bits = allocate(sensitivity, numel, budget, penalty=1.0)
    assert average(numel, bits) <= budget
    best = min(
        total(sensitivity, dict(zip(names, choice, strict=True)))
        for choice in itertools.product(CHOICES, repeat=6)
        if average(numel, dict(zip(names, choice, strict=True))) <= budget
    )
    exact_for_its_own = min(
        total(sensitivity, dict(zip(names, choice, strict=True)))
        for choice in itertools.product(CHOICES, repeat=6)
        if average(numel, dict(zip(names, choice, strict=True))) <= average(numel, bits)
    )
    assert total(sensitivity, bits) >= best
    # the tensors differ by orders of magnitude, so a last step that does not fit is all that may be lost
    steps = (c * step_error(1) for c in sensitivity.values())
    assert total(sensitivity, bits) <= exact_for_its_own * (1 + 1e-9) or total(sensitivity, bits) - best <= max(steps)


def test_allocation_at_the_ends() -> None:
    numel = {"a": 100, "b": 300}
    assert allocate({"a": 1.0, "b": 1.0}, numel, 1.0) == {"a": 1, "b": 1}
    assert allocate({"a": 1.0, "b": 1.0}, numel, 2.0) == {"a": 2, "b": 2}
    assert allocate({"a": 1.0, "b": 1.0}, numel, 8.0) == {"a": 8, "b": 8}
    assert allocate({"a": 0.0, "b": 1.0}, numel, 3.25) == {"a": 1, "b": 4}
    assert allocate({}, {}, 3.0) == {}


def test_one_bit_counts_more_where_the_operation_is_no_linear_map() -> None:
    """One step up fits. The linear map's input is three times as sensitive, and the penalty is four."""
    sensitivity, numel = {":linear:0": 3.0, ":gelu:0": 1.0}, {":linear:0": 100, ":gelu:0": 100}
    assert allocate(sensitivity, numel, 1.5) == {":linear:0": 1, ":gelu:0": 2}
    assert allocate(sensitivity, numel, 1.5, penalty=1.0) == {":linear:0": 2, ":gelu:0": 1}


def test_what_needs_no_codes_counts_with_no_bits() -> None:
    """Twice the average may be spent on codes that serve as many elements again; the state keeps that."""
    allocation = Allocation(2.0, str)
    allocation.learn({"a": 1.0, "b": 1.0}, {"a": 100, "b": 100}, {"a": 100, "b": 100})
    assert allocation.bits == {"a": 4, "b": 4}
    again = Allocation(2.0, str)
    again.load_state_dict(allocation.state_dict())
    assert again.bits == allocation.bits


def test_unseen_tensors_get_what_is_safe() -> None:
    allocation = Allocation(3.0, lambda key: key.partition(":")[2])
    assert allocation("0:a", False) == 3  # nothing is known, and the budget is to be kept
    assert allocation("0:a", True) == 8
    allocation.learn({"0:a": 1e6, "1:a": 1.0, "0:b": 1e-6, "1:b": 1e-6}, {"0:a": 1, "1:a": 1, "0:b": 99, "1:b": 99})
    assert (allocation("0:a", False), allocation("0:b", False)) == (8, 3)
    assert allocation("7:a", False) == max(allocation("0:a", False), allocation("1:a", False))  # as its kind
    assert allocation("0:c", False) == 8  # of no kind that is known
    again = Allocation(3.0, lambda key: key.partition(":")[2])
    again.load_state_dict(allocation.state_dict())
    assert again.bits == allocation.bits and again("7:a", False) == allocation("7:a", False)


def test_queries_and_keys_have_four_bits_and_the_others_two_at_least_where_that_fits() -> None:
    """However little they seem to matter: sensitivities drift until they are measured again."""
    numel = {"qk": 100, "a": 300, "b": 300}
    sensitivity = {"qk": 1e-9, "a": 1.0, "b": 1e-9}
    for budget, expected in (
        (3.0, {"qk": 4, "a": 3, "b": 2}),
        (2.1, {"qk": 4, "a": 2, "b": 1}),
        (1.0, {"qk": 4, "a": 1, "b": 1}),  # more than the budget holds
    ):
        allocation = Allocation(budget, str)
        allocation.learn(sensitivity, numel, wide={"qk"})
        assert allocation.bits == expected, budget
        assert budget == 1 or average(numel, allocation.bits) <= budget
        again = Allocation(budget, str)
        again.load_state_dict(allocation.state_dict())
        assert again.bits == allocation.bits


def test_divide() -> None:
    assert divide(6.0, ["a", "b"], {"a": 1.0, "b": 2.0}) == {"a": 2.0, "b": 4.0}
    assert divide(6.0, ["a", "b"], {"a": 0.0, "b": 0.0}) == {"a": 3.0, "b": 3.0}


class _Net(nn.Module):
    """Two blocks with a map, an activation and a norm each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _gradient(net: nn.Module, x: Tensor, y: Tensor, engine: Engine | None, seed: int = 0) -> Tensor:
    if engine is None:
        loss = F.mse_loss(net(x), y)
    else:
        with engine.forward(seed, ()):
            loss = F.mse_loss(net(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def test_the_sensitivity_of_a_linear_maps_input_comes_from_the_ordinary_pass() -> None:
    """Within 25 % of the squared error that rounding this tensor alone makes, measured over 40 passes."""
    torch.manual_seed(0)
    net, x, y = _Net(), torch.randn(512, 32, requires_grad=True), torch.randn(512, 32)
    exact = _gradient(net, x, y, None)
    statistics, engine = Statistics(), Engine(net, bits=lambda key, wide: 4)
    engine.on_groups, engine.on_output = statistics.on_groups, statistics.on_output
    _gradient(net, x, y, engine)
    engine.on_groups = engine.on_output = None
    guesses = statistics.guesses()
    direct = [key for key in guesses if is_direct(key)]
    assert len(direct) == 4
    for only in direct:
        engine.bits = lambda key, wide: 4 if key == only else 32  # noqa: B023
        errors = [float((_gradient(net, x, y, engine, s) - exact).square().sum()) for s in range(40)]
        assert guesses[only] * step_error(4) == pytest.approx(sum(errors) / 40, rel=0.25), only


def test_kinds_are_the_same_for_all_blocks_and_leave_out_what_is_known() -> None:
    net, x = _Net(), torch.randn(64, 32, requires_grad=True)
    statistics, engine = Statistics(), Engine(net, bits=lambda key, wide: 4)
    engine.on_groups = statistics.on_groups
    with engine.forward(0, ()):
        net(x)
    found = kinds(statistics, engine.tensors.family)
    assert found == {
        "blocks.*.1:gelu:0": ["blocks.0.1:gelu:0", "blocks.1.1:gelu:0"],
        "blocks.*.3:layer_norm:0": ["blocks.0.3:layer_norm:0", "blocks.1.3:layer_norm:0"],
    }


def test_names_do_not_depend_on_what_else_runs() -> None:
    net, x = _Net(), torch.randn(64, 32, requires_grad=True)
    names: list[set[str]] = []
    for block in (None, 0):
        statistics, engine = Statistics(), Engine(net, bits=lambda key, wide: 4)
        engine.on_groups = statistics.on_groups
        with engine.forward(0, ()):
            net(x) if block is None else net.blocks[1](x)
        names.append(set(statistics.numel))
    assert names[1] < names[0] and all(".1." in f".{name}" for name in names[1])
