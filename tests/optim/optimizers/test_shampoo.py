"""Shampoo against the rule written out in float64, pytorch-optimizer's where it is the first paper's, and polar factors."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff import ReplaceOptimizer, Shampoo
from lightning_eff.optim.optimizers.shampoo import inverse_root
from tests.models import make_batch, module
from tests.optim.optimizers.matrices import parameters, train
from tests.runs import checkpoints, differences, final_state, fit

SHAPES = [(6, 6), (8, 6), (6, 8), (5, 5)]


def power(c: Tensor, exponent: float, eps: float) -> Tensor:
    """By singular vectors, of one side, since the others may turn where values are zero."""
    u, s, _ = torch.linalg.svd(c)
    return (u * (s + eps * s[0]) ** exponent) @ u.T


class Reference:
    """The papers' rule, matrix by matrix, without blocks."""

    def __init__(self, params: list[nn.Parameter], graft: str | None, every: int, b2: float = 0.9) -> None:
        self.params, self.graft, self.every, self.b2 = params, graft, every, b2
        self.states: list[dict[str, Any]] = [{} for _ in params]

    def step(self) -> None:
        with torch.no_grad():
            for p, s in zip(self.params, self.states, strict=True):
                if p.grad is not None:
                    self.one(p, p.grad, s)

    def one(self, w: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        t = s["t"] = s.get("t", 0) + 1
        for name, value in (("m", g), ("v", g**2), ("L", g @ g.T), ("R", g.T @ g)):
            b = 0.8 if name == "m" else self.b2
            s[name] = b * s.get(name, 0) + (1 - b) * value
        m = s["m"] / (1 - 0.8**t)
        if (t - 1) % self.every == 0:
            s["l"], s["r"] = (power(s[name] / (1 - self.b2**t), -0.25, 1e-4) for name in "LR")
        u = s["l"] @ m @ s["r"]
        a = {"sgd": m, "adam": m / ((s["v"] / (1 - self.b2**t)).sqrt() + 1e-8), None: u}[self.graft]
        w.mul_(1 - 0.02 * 0.1).sub_(0.02 * a.norm() / u.norm() * u)


@pytest.mark.parametrize("graft", ["adam", "sgd", None])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_papers_rule(graft: str | None, every: int) -> None:
    a, b = parameters(SHAPES), parameters(SHAPES)
    train(a, Shampoo(a, 0.02, (0.8, 0.9), 1e-4, 0.1, graft=graft, root_steps=every, split=None))
    train(b, Reference(b, graft, every))
    for p, q, start in zip(a, b, parameters(SHAPES), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
        assert (p - start).abs().min() > 0


def test_it_is_pytorch_optimizers_where_covariances_are_summed() -> None:
    other = pytest.importorskip("pytorch_optimizer")
    a, b = parameters([(5, 5), (6, 6)]), parameters([(5, 5), (6, 6)])
    ours = Shampoo(a, 0.05, (0.0, 1.0), 1e-14, 0.0, graft=None, root_steps=1, split=None)
    theirs = other.Shampoo(b, lr=0.05, matrix_eps=1e-14)
    for step in range(6):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(6, 6), (8, 5), (4, 9)])
def test_the_first_step_is_the_polar_factor_of_the_gradient(shape: tuple[int, int]) -> None:
    (w,) = parameters([shape])
    start = w.detach().clone()
    w.grad = torch.randn(shape, dtype=w.dtype)
    u, _, vh = torch.linalg.svd(w.grad, full_matrices=False)
    Shampoo([w], 0.3, eps=1e-13, weight_decay=0.0, graft=None, split=None).step()
    torch.testing.assert_close(start - w.detach(), 0.3 * u @ vh, rtol=1e-5, atol=1e-6)


def test_a_grafted_step_is_as_long_as_adams_in_another_direction() -> None:
    a, b = parameters(SHAPES), parameters(SHAPES)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0}
    ours, theirs = Shampoo(a, split=None, root_steps=2, **settings), torch.optim.Adam(b, **settings)
    for seed in range(4):
        before = [(p.detach().clone(), q.detach().clone()) for p, q in zip(a, b, strict=True)]
        train(a, ours, steps=1, seed=seed)
        train(b, theirs, steps=1, seed=seed)
        for p, q, (x, y) in zip(a, b, before, strict=True):
            mine, adams = (p - x).detach(), (q - y).detach()
            torch.testing.assert_close(mine.norm(), adams.norm(), rtol=1e-7, atol=0.0)
            assert (mine * adams).sum() < 0.99 * adams.norm() ** 2


def test_blocks_are_stepped_as_if_they_were_apart() -> None:
    (whole,) = parameters([(7, 5)])
    parts = [nn.Parameter(b.clone()) for a in whole.detach().split(3, 0) for b in a.split(3, 1)]
    settings: dict[str, Any] = {"graft": None, "split": None, "eps": 1e-3, "root_steps": 2}
    one, many = Shampoo([whole], 0.1, block_size=3, **settings), Shampoo(parts, 0.1, vectors=True, **settings)
    for step in range(4):
        whole.grad = torch.randn(7, 5, dtype=whole.dtype, generator=torch.Generator().manual_seed(step))
        for p, g in zip(parts, (b for a in whole.grad.split(3, 0) for b in a.split(3, 1)), strict=True):
            p.grad = g.clone()
        one.step()
        many.step()
    for p, q in zip((b for a in whole.detach().split(3, 0) for b in a.split(3, 1)), parts, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-9, atol=1e-10)
    sizes = {tuple(v.shape) for name, v in one.state[whole].items() if name.startswith("root")}
    assert sizes == {(3, 3), (2, 2)}, "a side of one has no factor"


@pytest.mark.parametrize("b2", [0.9, 1.0])
def test_what_is_no_matrix_is_stepped_as_by_adamw(b2: float) -> None:
    a, b = parameters([(7,), (6, 6), (5,)]), parameters([(7,), (6, 6), (5,)])
    train(a, Shampoo(a, 0.01, (0.8, b2), weight_decay=0.2, graft_eps=1e-6))
    train(b, torch.optim.AdamW([b[0], b[2]], 0.01, (0.8, 0.9 if b2 < 1 else 0.999), 1e-6, 0.2))
    for i in (0, 2):
        torch.testing.assert_close(a[i], b[i], rtol=1e-10, atol=1e-12)


def test_eigenvalues_that_rounding_made_negative_count_as_zero() -> None:
    root = inverse_root(torch.diag(torch.tensor([4.0, -1e-3]).double())[None], 0.5, 1e-6)
    torch.testing.assert_close(root[0].diagonal(), torch.tensor([4 * (1 + 1e-6), 4e-6]).double() ** -0.5)


@pytest.mark.parametrize("size", [16, 96])
def test_nearly_singular_gradients_in_single_precision_take_steps_of_length_one(size: int) -> None:
    # the roots at both sides of one gradient leave its polar factor, of which no singular value exceeds 1
    g = torch.Generator().manual_seed(2)
    for _ in range(4):
        w = nn.Parameter(torch.zeros(size, size))
        u, v = (torch.linalg.qr(torch.randn(size, size, generator=g)).Q for _ in range(2))
        w.grad = u @ torch.diag(torch.logspace(0, -7, size)) @ v
        Shampoo([w], 1.0, eps=1e-12, weight_decay=0.0, graft=None, split=None).step()
        assert torch.linalg.matrix_norm(w.detach(), 2) <= 1.05


@pytest.mark.parametrize("root_steps", [1, 10])
def test_gradients_of_zero_and_such_that_are_not_finite(root_steps: int) -> None:
    """Also where roots are computed of what is not finite, which torch's eigenvalues would fail at."""
    for graft in ("adam", "sgd", None):
        (w,) = parameters([(4, 4)])
        settings: dict[str, Any] = {"weight_decay": 0.0, "graft": graft, "root_steps": root_steps, "split": None}
        start, optimizer = w.detach().clone(), Shampoo([w], 0.1, **settings)
        w.grad = torch.zeros_like(w)
        optimizer.step()
        assert torch.equal(w, start)
        w.grad = torch.full_like(w, float("nan"))
        optimizer.step()
        assert w.isnan().all()


@pytest.mark.parametrize("name", ["gpt2", "vit", "bert", "tiny_gpt"])
def test_modules_bring_their_matrices_and_train(name: str) -> None:
    net = module(name)
    net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = Shampoo(net, lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = net.training_step(make_batch(name), 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    folded = {n for n, p in net.named_parameters() if "root_0_0" in optimizer.state[p]}
    assert len(folded) >= 16 and not [n for n in folded if "embed" in n or "head" in n or "wte" in n]


# -- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_state_loads_bit_for_bit_and_survives_copies(dtype: torch.dtype) -> None:
    params = parameters([(6, 6), (5, 3, 2), (4,)], dtype)
    optimizer = Shampoo(params, 0.01, root_steps=3)
    train(params, optimizer, steps=4)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = Shampoo(others, 0.01, root_steps=3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, copied_params = copy.deepcopy((optimizer, params))
    expected = train(params, optimizer, steps=5)
    for held, one in ((others, again), (copied_params, copied)):
        assert all(torch.equal(x, y) for x, y in zip(train(held, one, steps=5), expected, strict=True))


def test_it_trains_and_resumes_in_an_unchanged_module(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> dict[str, Tensor]:
        other = {"class_path": "lightning_eff.Shampoo", "init_args": {"lr": 0.01, "root_steps": 3, "block_size": 24}}
        build = lambda: [ReplaceOptimizer(other, "matrices")]  # noqa: E731
        return final_state(
            *fit("tiny_gpt", build, gradient_clip_val=0.5, accumulate_grad_batches=2, max_steps=6, **kwargs)
        )

    whole = run(directory=tmp_path)
    assert any("root" in name for name in whole)
    for path in checkpoints(tmp_path)[1:5:2]:
        assert differences(whole, run(resume=path)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"Shampoo\(lr=-1.0\): expected a finite number >= 0"),
        ({"betas": (0.9, 1.1)}, r"Shampoo\(betas=\(0.9, 1.1\)\): expected 2 values, each a number in \[0, 1\]"),
        ({"graft": "adagrad"}, r"Shampoo\(graft='adagrad'\): expected 'adam' or 'sgd', or None"),
        ({"root_steps": 0}, "root_steps=0"),
        ({"block_size": 1.5}, "block_size=1.5"),
        ({"eps": float("inf")}, "eps=inf"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shampoo(parameters(SHAPES), **settings)


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r'no hidden matrix among 1 parameters .*"algorithm": "shampoo"'):
        Shampoo([nn.Parameter(torch.zeros(3))])
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = Shampoo(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"Shampoo: the gradient of a parameter of shape \(5, 4\) is sparse"):
        optimizer.step()
