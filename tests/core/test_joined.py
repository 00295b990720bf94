"""Parameters that another optimizer steps beside the module's, also where that has several parts; clipping of sparse ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff._core._optim.combined import EXTRA, CombinedOptimizer
from lightning_eff._core._optim.moved_parameters import join
from lightning_eff._core._optim.sparse import dense_views


def tensors(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(i))) for i in range(count)]


def sgd(lr: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[list[float], float]]:
    """By group: the first element of each parameter, and the rate."""
    return [([float(p.detach()[0]) for p in g["params"]], pytest.approx(g["lr"])) for g in optimizer.param_groups]  # type: ignore[misc]


def test_another_part_has_its_rate_in_proportion_and_the_rest_stays() -> None:
    a, b, c = tensors(3)
    own = torch.optim.AdamW([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.2}])
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (step + 1))
    found = join(own, [schedule], [b], sgd(0.5), who="Test")
    assert rates(found) == [([1.0], 0.5), ([2.0], 0.2), ([0.0], 0.1)]  # the first two are the module's two in turn
    for p in (a, b, c):
        p.grad = torch.ones(2)
    found.step()
    schedule.step()
    assert rates(found)[0][1] == 0.25 and [r for _, r in rates(found)][1:] == [0.1, 0.05]
    again = join(found, [schedule], [c], sgd(0.8), who="Test")
    assert again is found and len(found.parts) == 3
    assert [(len(held), rate) for held, rate in rates(found)] == [(1, 0.25), (1, 0.4), (1, 0.05)]
    schedule.step()
    assert [rate for _, rate in rates(found)] == [
        pytest.approx(0.5 / 3),
        pytest.approx(0.8 / 3),
        pytest.approx(0.1 / 3),
    ]
    before = c.detach().clone()
    found.step()
    torch.testing.assert_close(c.detach(), before - 0.8 / 3)
    assert set(found.defaults) <= set.intersection(*({*g} for g in found.param_groups))
    held = found.state_dict()
    found.load_state_dict(held)
    assert [part["optimizer"] for part in held["param_groups"][0][EXTRA][0]["parts"]] == ["SGD", "SGD", "AdamW"]


def test_an_optimizer_of_which_all_is_taken_is_left_out() -> None:
    (a,) = tensors(1)
    found = join(torch.optim.AdamW([a]), [], [a], sgd(0.5), who="Test")
    assert isinstance(found, CombinedOptimizer) and [type(part) for part in found.parts] == [torch.optim.SGD]


def test_a_rate_in_proportion_to_nothing_is_refused() -> None:
    a, b = tensors(2)
    own = torch.optim.SGD([a, b], lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.5)
    with pytest.raises(
        ValueError,
        match=r"Test: the module's SGD has a learning rate of 0.0 in group 0, which a scheduler changes, so 0.5 cannot",
    ):
        join(own, [schedule], [b], sgd(0.5), who="Test")


def sparse_and_dense() -> tuple[list[Tensor], list[Tensor]]:
    """The same gradients twice: one of a table with a row that is met twice, one of a vector."""
    rows, values = torch.tensor([[3, 1, 3]]), torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]])
    found: list[list[Tensor]] = []
    for dense in (False, True):
        table, vector = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(3))
        gradient = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True)
        table.grad = gradient.to_dense() if dense else gradient
        vector.grad = torch.tensor([1.0, -7.0, 2.0])
        found.append([table, vector])
    return found[0], found[1]


@pytest.mark.parametrize(
    "clip", [lambda p: torch.nn.utils.clip_grad_norm_(p, 0.3), lambda p: torch.nn.utils.clip_grad_value_(p, 2.5)]
)
def test_sparse_gradients_are_clipped_as_dense_ones(clip: Any) -> None:
    sparse, dense = sparse_and_dense()
    norms = [clip(list(dense_views(sparse))), clip(dense)]
    if norms[0] is not None:
        torch.testing.assert_close(norms[0], norms[1])
    for mine, theirs in zip(sparse, dense, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.to_dense(), theirs.grad)
