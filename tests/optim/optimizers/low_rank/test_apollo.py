"""APOLLO against the paper's algorithm written out in float64, its projections, and its limit of growth."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff import APOLLO, ReplaceOptimizer
from lightning_eff.optim.optimizers.low_rank.apollo import limited, projection
from tests.optim.optimizers.low_rank.test_ga_lore import SHAPES, gradients_of, step_along
from tests.optim.optimizers.matrices import parameters, train
from tests.runs import differences, final_state, fit

Arguments = dict[str, Any]


def reference(
    params: list[nn.Parameter],
    gradients: list[list[Tensor]],
    r: int,
    T: int,
    alpha: float,
    by: str,
    gamma: float | None,
) -> None:
    """The paper's Algorithm 1, entry by entry; projections alone are the optimizer's."""
    b1, b2, eps, lr = 0.9, 0.999, 1e-6, 0.02
    for number, (p, of_steps) in enumerate(zip(params, gradients, strict=True)):
        turned = p.shape[0] > p.shape[1]
        W = p.detach().T if turned else p.detach()
        M = V = torch.zeros(r, W.shape[1], dtype=W.dtype)
        last = None
        for t, G in enumerate(of_steps):
            G = G.T if turned else G
            R = projection(r, G, 5, number, 0, t // T) @ G
            M, V = b1 * M + (1 - b1) * R, b2 * V + (1 - b2) * R**2
            N = M / (1 - b1 ** (t + 1)) / ((V / (1 - b2 ** (t + 1))).sqrt() + eps)
            if by == "channel":
                U = torch.stack([G[:, j] * N[:, j].norm() / R[:, j].norm() for j in range(G.shape[1])], 1)
            else:
                U = G * (N.norm() / R.norm())
            if gamma is not None and last is not None and U.norm() / last > gamma:
                U = U / U.norm() * gamma * last
            last = U.norm()
            W -= lr * alpha * U


@pytest.mark.parametrize(
    ("rank", "refresh", "by", "alpha", "gamma"),
    [
        (3, 1, "channel", 1.0, 1.01),
        (3, 3, "channel", 0.7, None),
        (1, 100, "tensor", 128**0.5, 1.2),
        (1, 2, "tensor", 2.0, 1.0),
    ],
)
def test_it_is_the_papers_rule(rank: int, refresh: int, by: Any, alpha: float, gamma: float | None) -> None:
    shapes = SHAPES[:3]
    a, b, gradients = parameters(shapes), parameters(shapes), gradients_of(shapes, 8)
    ours = APOLLO(a, 0.02, rank=rank, refresh_steps=refresh, scale=alpha, scale_by=by, growth=gamma, seed=5, split=None)
    step_along(a, gradients, ours)
    reference(b, gradients, rank, refresh, alpha, by, gamma)
    for p, q, start in zip(a, b, parameters(shapes), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
        assert (p - start).abs().max() > 0.01


def test_each_channel_keeps_the_direction_of_its_gradient() -> None:
    for shape, dim in (((6, 9), 0), ((12, 6), 1)):
        (w,) = parameters([shape])
        start, (gradients,) = w.detach().clone(), gradients_of([shape], 1)
        step_along([w], [gradients], APOLLO([w], 0.1, rank=2, split=None))
        cosines = torch.cosine_similarity(start - w.detach(), gradients[0], dim=dim)
        torch.testing.assert_close(cosines, torch.ones_like(cosines))


def test_projections_are_normal_and_keep_norms_on_average() -> None:
    G = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    P = projection(100, G, 0, 1, 0, 0)
    assert P.shape == (100, 400) and P.dtype == torch.float64
    assert P.mean().abs() < 4 * (0.1 / 200) and P.std() == pytest.approx(0.1, rel=0.02)
    norms = torch.stack([(projection(100, G, 0, 1, 0, k) @ G).square().sum(0) for k in range(40)]).mean(0)
    torch.testing.assert_close(norms, G.square().sum(0), rtol=0.1, atol=0)
    others = [projection(100, G, *key) for key in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1))]
    assert all((P - other).abs().mean() > 0.05 for other in others)
    assert torch.equal(P, projection(100, G, 0, 1, 0, 0))


def test_the_norm_grows_by_the_factor_at_most() -> None:
    U = torch.tensor([3.0, 4.0])
    for last, expected in ((None, 5.0), (torch.tensor(2.0), 2.2), (torch.tensor(10.0), 5.0), (torch.tensor(0.0), 5.0)):
        found, size = limited(U, last, 1.1)
        assert found.norm() == pytest.approx(expected) and size == pytest.approx(expected)


def test_a_gradient_of_zeros_moves_nothing_and_what_is_not_finite_shows() -> None:
    (w,) = parameters([(6, 8)])
    start, optimizer = w.detach().clone(), APOLLO([w], rank=2, split=None)
    w.grad = torch.zeros_like(w)
    optimizer.step()
    assert torch.equal(w, start)
    w.grad = torch.full_like(w, float("nan"))
    optimizer.step()
    assert w.isnan().all()


def test_the_state_is_two_r_n_and_a_norm() -> None:
    params = parameters(SHAPES)
    optimizer = APOLLO(params, rank=1, scale_by="tensor", split=None)
    train(params, optimizer, steps=1)
    sizes = [sum(v.numel() for v in optimizer.state[p].values() if isinstance(v, Tensor)) for p in params]
    assert sizes == [2 * 9 + 1, 2 * 12 + 1, 2 * 8 + 1, 2 * 7]


def test_its_state_is_saved_and_loaded() -> None:
    a = parameters(SHAPES, torch.bfloat16)
    one = APOLLO(a, rank=3, refresh_steps=3, split=None)
    train(a, one, steps=4)
    b = copy.deepcopy(a)
    two = APOLLO(b, rank=3, refresh_steps=3, split=None)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for params, optimizer in ((a, one), (b, two)):
        train(params, optimizer, steps=4, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_it_replaces_the_optimizer_of_an_unchanged_module() -> None:
    net, t = fit("tiny_gpt", lambda: [ReplaceOptimizer("apollo", lr=0.01, rank=4, refresh_steps=5)])
    assert t.global_step == 12 and differences(final_state(net, t), final_state(*fit("tiny_gpt", list))) != []
    combined: Any = t.optimizers[0]
    assert any(isinstance(part, APOLLO) for part in combined.parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 8}, "APOLLO(rank=8): no matrix has two sides longer than this"),
        ({"growth": 0.5}, "APOLLO(growth=0.5): expected a finite number >= 1, or None"),
        ({"scale_by": "row"}, "APOLLO(scale_by='row'): expected 'channel' or 'tensor'"),
        ({"seed": -1}, "APOLLO(seed=-1): expected an integer >= 0"),
    ],
)
def test_values_out_of_range(settings: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        APOLLO(parameters(SHAPES), **settings)
