"""Lion, Adan, ACClip, LARS and LAMB against their papers' rules written out in float64, pytorch-optimizer where its rule is the
paper's, and the property that each must have.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import LAMB, LARS, ACClip, Adan, Lion, ReplaceOptimizer
from tests.models import flat, loader, module, trainer
from tests.runs import checkpoints, differences, final_state, fit

RULES: dict[str, Callable[..., Any]] = {
    "ACClip": functools.partial(ACClip, lr=0.5, weight_decay=0.1),
    "Lion": functools.partial(Lion, lr=0.01, weight_decay=0.1),
    "Adan": functools.partial(Adan, lr=0.01, weight_decay=0.1),
    "LARS": functools.partial(LARS, lr=0.5, weight_decay=0.1, trust=0.02),
    "LAMB": functools.partial(LAMB, lr=0.02, weight_decay=0.1),
}
SHAPES = ((6, 4), (3, 2, 2), (5,), (4, 4))


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def train(params: list[nn.Parameter], optimizer: Any, steps: int = 6, grads: Any = None) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    seen = []
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
            if step == 2 and i == 1:
                p.grad = None  # a step that does not reach it
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    return seen


class Reference:
    """The papers' rules, tensor by tensor, with the papers' symbols."""

    def __init__(self, name: str, params: list[nn.Parameter]) -> None:
        self.rule, self.params = getattr(self, name.lower()), params
        self.state: list[dict[str, Any]] = [{} for _ in params]

    def step(self) -> None:
        with torch.no_grad():
            for p, s in zip(self.params, self.state, strict=True):
                if p.grad is not None:
                    s["t"] = s.get("t", 0) + 1
                    p.copy_(self.rule(p, p.grad, s))

    def lion(self, w: Tensor, g: Tensor, s: dict[str, Any]) -> Tensor:
        m = s.get("m", torch.zeros_like(w))
        s["m"] = 0.99 * m + 0.01 * g
        return w - 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.1 * w)

    def acclip(self, w: Tensor, g: Tensor, s: dict[str, Any], alpha: float = 1.0) -> Tensor:
        zero = torch.zeros_like(w)
        s["m"] = 0.9 * s.get("m", zero) + 0.1 * g
        s["tau"] = (0.99 * s.get("tau", zero) ** alpha + 0.01 * g.abs() ** alpha) ** (1 / alpha)
        clipped = torch.minimum(s["tau"] / (s["m"].abs() + 1e-5), torch.ones_like(w)) * s["m"]
        return w - 0.5 * (clipped + 0.1 * w)

    def adan(self, w: Tensor, g: Tensor, s: dict[str, Any]) -> Tensor:
        zero, t = torch.zeros_like(w), s["t"]
        d = g - s.get("g", g)
        s["g"] = g.clone()
        s["m"] = 0.98 * s.get("m", zero) + 0.02 * g
        s["v"] = 0.92 * s.get("v", zero) + 0.08 * d
        s["n"] = 0.99 * s.get("n", zero) + 0.01 * (g + 0.92 * d) ** 2
        m, v, n = s["m"] / (1 - 0.98**t), s["v"] / (1 - 0.92**t), s["n"] / (1 - 0.99**t)
        return (w - 0.01 * (m + 0.92 * v) / (n.sqrt() + 1e-8)) / (1 + 0.01 * 0.1)

    def lars(self, w: Tensor, g: Tensor, s: dict[str, Any]) -> Tensor:
        beta, local = 0.0, 1.0
        if w.ndim > 1:
            beta, local = 0.1, float(0.02 * w.norm() / (g.norm() + 0.1 * w.norm()))
        s["v"] = 0.9 * s.get("v", 0.0) + 0.5 * local * (g + beta * w)
        return w - s["v"]

    def lamb(self, w: Tensor, g: Tensor, s: dict[str, Any]) -> Tensor:
        zero, t = torch.zeros_like(w), s["t"]
        s["m"] = 0.9 * s.get("m", zero) + 0.1 * g
        s["v"] = 0.999 * s.get("v", zero) + 0.001 * g * g
        u = (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-6)
        if w.ndim == 1:
            return w - 0.02 * u
        u = u + 0.1 * w
        return w - 0.02 * w.norm() / u.norm() * u


@pytest.mark.parametrize("name", sorted(RULES))
def test_it_is_the_papers_rule(name: str) -> None:
    ours, theirs = parameters(), parameters()
    a, b = train(ours, RULES[name](ours)), train(theirs, Reference(name, theirs))
    for found, expected in zip(a, b, strict=True):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("alpha", [2.0, 1.5])
def test_acclip_takes_other_moments(alpha: float) -> None:
    ours, theirs = parameters(), parameters()
    reference = Reference("ACClip", theirs)
    reference.rule = functools.partial(reference.acclip, alpha=alpha)
    a, b = train(ours, RULES["ACClip"](ours, alpha=alpha)), train(theirs, reference)
    for x, y in zip(a[-1], b[-1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
        ("Adan", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.98, 0.92, 0.99)}),
    ],
)
def test_it_is_pytorch_optimizers(name: str, theirs: dict[str, Any]) -> None:
    other = pytest.importorskip("pytorch_optimizer")
    ours, plain = parameters(torch.float32), parameters(torch.float32)
    mine, optimizer = RULES[name](ours), getattr(other, name)(plain, foreach=False, **theirs)
    for _ in range(5):
        for p, q in zip(ours, plain, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        optimizer.step()
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


# -- the property of each


def test_lion_moves_every_weight_by_the_rate_whatever_the_gradients_scale() -> None:
    small, large = parameters(), parameters()
    a, b = Lion(small, lr=0.01), Lion(large, lr=0.01)
    for _ in range(4):
        before = [p.detach().clone() for p in small]
        for p, q in zip(small, large, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad * 1000
        a.step()
        b.step()
        for p, q, old in zip(small, large, before, strict=True):
            torch.testing.assert_close((p - old).abs(), torch.full_like(p, 0.01))
            torch.testing.assert_close(p, q)


def test_adan_steps_by_the_sign_of_a_constant_gradient() -> None:
    params = parameters()
    optimizer, grads = Adan(params, lr=0.01), [torch.randn_like(p) for p in params]
    for _ in range(5):
        before = [p.detach().clone() for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for p, old, g in zip(params, before, grads, strict=True):
            torch.testing.assert_close(p - old, -0.01 * g.sign(), rtol=1e-5, atol=1e-9)


def test_acclip_clips_outliers_and_leaves_the_other_steps_to_momentum() -> None:
    """A weight moves by min(|m|, tau) at most: an outlier of 1000 standard deviations by hardly more than usual."""
    p = nn.Parameter(torch.zeros(400, dtype=torch.float64))
    optimizer, generator = ACClip([p], lr=1.0, betas=(0.5, 0.99), eps=1e-12), torch.Generator().manual_seed(0)
    m, tau = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(500):
        before, p.grad = p.detach().clone(), torch.randn(400, generator=generator, dtype=torch.float64)
        p.grad[0] *= 1000 if step == 499 else 1
        m, tau = 0.5 * m + 0.5 * p.grad, 0.99 * tau + 0.01 * p.grad.abs()
        optimizer.step()
        moved = before - p.detach()
        torch.testing.assert_close(moved, m.sign() * torch.minimum(m.abs(), tau), rtol=1e-9, atol=1e-12)
    clipped = m.abs() > tau
    assert 0.1 < clipped.double().mean() < 0.5 and clipped[0]
    assert float(moved[0].abs()) < 0.03 * float(m[0].abs())


def test_acclips_steps_scale_with_the_gradients() -> None:
    small, large = parameters(), parameters()
    a, b = ACClip(small, lr=0.1, eps=1e-12), ACClip(large, lr=0.1, eps=1e-12)
    start = [p.detach().clone() for p in small]
    for _ in range(4):
        for p, q in zip(small, large, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad * 8
        a.step()
        b.step()
    for p, q, old in zip(small, large, start, strict=True):
        torch.testing.assert_close((q - old), 8 * (p - old))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_of_lamb_and_lars_are_a_part_of_the_weights(weight_decay: float) -> None:
    params = parameters()
    optimizer = LAMB(params, lr=0.02, weight_decay=weight_decay, vectors=True)
    for _ in range(4):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close((p - old).norm(), 0.02 * old.norm())
    params = parameters()
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p) * 7
    LARS(params, lr=2.0, weight_decay=0.0, trust=0.01, vectors=True).step()
    for p, old in zip(params, before, strict=True):
        torch.testing.assert_close((p - old).norm(), 2.0 * 0.01 * old.norm())


@pytest.mark.parametrize("rule", [LAMB, LARS])
def test_weights_of_zero_move_all_the_same(rule: Any) -> None:
    p = nn.Parameter(torch.zeros(3, 3))
    p.grad = torch.ones(3, 3)
    rule([p], lr=0.1).step()
    assert (p < 0).all() and p.isfinite().all()


# -- in a run


@pytest.mark.parametrize("name", sorted(RULES))
def test_its_state_is_as_large_as_it_says_and_loads(name: str) -> None:
    params = parameters()
    optimizer = RULES[name](params)
    train(params, optimizer, steps=3)
    tensors = {"ACClip": 2, "Lion": 1, "Adan": 4, "LARS": 1, "LAMB": 2}[name]
    for p in params:
        held = [value for value in optimizer.state[p].values() if isinstance(value, Tensor)]
        assert sum(value.numel() for value in held) == tensors * p.numel()
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = RULES[name](others)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    a, b = train(params, optimizer, steps=2), train(others, again, steps=2)
    assert all(torch.equal(x, y) for x, y in zip(a[-1], b[-1], strict=True))


@pytest.mark.parametrize("name", sorted(RULES))
def test_it_trains_and_resumes_in_an_unchanged_module(name: str, tmp_path: Path) -> None:
    """By its class path, under clipping and accumulation; bit for bit from a checkpoint."""

    def run(**kwargs: Any) -> dict[str, Tensor]:
        build = lambda: [ReplaceOptimizer(f"lightning_eff.{name}", "all", lr=0.01)]  # noqa: E731
        return final_state(
            *fit("tiny_gpt", build, gradient_clip_val=0.5, accumulate_grad_batches=2, max_steps=6, **kwargs)
        )

    whole = run(directory=tmp_path)
    (path,) = checkpoints(tmp_path)[3:4]
    assert differences(whole, run(resume=path)) == []
    assert torch.load(path, weights_only=True)["optimizer_states"]


@pytest.mark.parametrize("name", sorted(RULES))
def test_it_learns_in_configure_optimizers(name: str) -> None:
    pl.seed_everything(1, verbose=False)
    net = module("classifier")
    net.configure_optimizers = lambda: RULES[name](net.parameters())  # type: ignore[method-assign]
    data = loader("classifier", 64, 16)

    def loss() -> float:
        with torch.no_grad():
            return float(sum(net.validation_loss(batch) for batch in data))

    net.validation_loss = lambda batch: nn.functional.cross_entropy(net.eval()(batch[0]), batch[1])  # type: ignore[assignment]
    before, weights = loss(), flat(net).clone()
    net.train()
    trainer(max_epochs=15).fit(net, data)
    assert loss() < 0.8 * before and not torch.equal(flat(net), weights)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (Lion, {"lr": -1.0}, r"Lion\(lr=-1.0\): expected a finite number >= 0"),
        (
            Lion,
            {"betas": (0.9, 1.0)},
            r"Lion\(betas=\(0.9, 1.0\)\): expected 2 values, each a number in \[0, 1\)",
        ),
        (ACClip, {"eps": 0.0}, "eps=0.0"),
        (ACClip, {"alpha": 0.0}, "alpha=0.0"),
        (Adan, {"betas": (0.9, 0.9)}, r"expected 3 values, each a number in \[0, 1\)"),
        (Adan, {"eps": float("nan")}, "eps=nan"),
        (LARS, {"momentum": 1.0}, "momentum=1.0"),
        (LARS, {"trust": -0.1}, "trust=-0.1"),
        (LAMB, {"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_bad_settings_are_refused(rule: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(parameters(), **settings)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"Lion: the gradient of a parameter of shape \(5, 4\) is sparse. Set sparse=False in"
    ):
        Lion(table.parameters()).step()
