"""Parameters that leave their groups: those that are frozen, and those whose rate is a multiple of their group's."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff._core._optim.parameter_multipliers import hasten
from lightning_eff._core._optim.removed_parameters import remove_parameters


def parameters(count: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def held(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def test_what_is_forgotten_is_in_no_group_and_groups_stay_as_many() -> None:
    a, b, c, d = parameters()
    optimizer = torch.optim.SGD([{"params": [("a", a), ("b", b)]}, {"params": [("c", c), ("d", d)], "lr": 0.5}], 0.1)
    remove_parameters(optimizer, [a, c, d])
    assert held(optimizer) == [[id(b)], []]
    assert [group["param_names"] for group in optimizer.param_groups] == [["b"], []]
    b.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(b, torch.full((2,), 0.9))


def test_an_optimizer_that_has_stepped_keeps_what_it_has() -> None:
    a, b, *_ = parameters()
    optimizer = torch.optim.Adam([a, b])
    a.grad = torch.ones(2)
    optimizer.step()
    remove_parameters(optimizer, [a])
    assert held(optimizer) == [[id(a), id(b)]]


@pytest.mark.parametrize("factor", [0.5, 16.0])
def test_the_hastened_have_a_group_of_their_own_that_schedulers_go_on_with(factor: float) -> None:
    a, b, c, d = parameters()
    optimizer = torch.optim.SGD(
        [{"params": [a, b], "lr": 0.1}, {"params": [c, d], "lr": 0.2, "weight_decay": 0.3}], 1.0
    )
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 1.0 + t])
    assert hasten(optimizer, [scheduler], [b, d], factor) == [b, d]
    assert held(optimizer) == [[id(a)], [id(c)], [id(b)], [id(d)]]
    for step in range(3):
        rates = [group["lr"] for group in optimizer.param_groups]
        first, second = 0.1 * 0.5**step, 0.2 * (1 + step)
        assert rates == pytest.approx([first, second, factor * first, factor * second])
        assert scheduler.get_last_lr() == pytest.approx(rates)
        optimizer.step()
        scheduler.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.3, 0, 0.3]
