"""GaLore against the paper's algorithm written out in float64, pytorch-optimizer, and Adam where the projection is whole."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_eff import GaLore, OptimizerInBackward, ReplaceOptimizer
from tests.models import TinyGPT, loader, trainer
from tests.optim.optimizers.matrices import parameters, train
from tests.runs import differences, final_state, fit

SHAPES = [(6, 9), (12, 6), (8, 8), (7,)]


def reference(
    params: list[nn.Parameter], gradients: list[list[Tensor]], lr: float, r: int, T: int, alpha: float
) -> None:
    """The paper's Algorithm 2, by the eigenvectors of G G^T; their signs are those of the largest entry of each."""
    b1, b2, eps = 0.9, 0.999, 1e-6
    for p, of_steps in zip(params, gradients, strict=True):
        M = V = P = None
        W = p.detach().T if p.ndim > 1 and p.shape[0] > p.shape[1] else p.detach()
        for t, G in enumerate(of_steps):
            G = G.T if W is not p and G.shape != W.shape else G
            if p.ndim > 1 and t % T == 0:
                P = torch.linalg.eigh(G @ G.T)[1].flip(1)[:, :r]
                P = P * torch.take_along_dim(P, P.abs().argmax(0, keepdim=True), 0).sign()
            R = G if P is None else P.T @ G
            M = (1 - b1) * R if M is None else b1 * M + (1 - b1) * R
            V = (1 - b2) * R**2 if V is None else b2 * V + (1 - b2) * R**2
            N = (M / (1 - b1 ** (t + 1))) / ((V / (1 - b2 ** (t + 1))).sqrt() + eps)
            W -= lr * (N if P is None else alpha * P @ N)


def gradients_of(shapes: Any, steps: int, seed: int = 3) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(steps)] for shape in shapes]


def step_along(params: list[nn.Parameter], gradients: list[list[Tensor]], optimizer: Any) -> None:
    for of_step in zip(*gradients, strict=True):
        for p, g in zip(params, of_step, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("refresh", [1, 3, 100])
def test_it_is_the_papers_rule(refresh: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # a singular vector has two signs: both implementations take that whose largest entry is positive
    plain = torch.linalg.svd

    def signed(G: Tensor, full_matrices: bool = True) -> Any:
        U, S, Vh = plain(G, full_matrices=full_matrices)
        shorter = U if G.shape[0] <= G.shape[1] else Vh.T
        sign = torch.take_along_dim(shorter, shorter.abs().argmax(0, keepdim=True), 0).sign()
        return SimpleNamespace(U=U * sign, S=S, Vh=Vh * sign.T)

    monkeypatch.setattr(torch.linalg, "svd", signed)
    a, b, gradients = parameters(SHAPES), parameters(SHAPES), gradients_of(SHAPES, 8)
    step_along(a, gradients, GaLore(a, 0.02, rank=3, refresh_steps=refresh, scale=0.7, split=None))
    reference(b, gradients, 0.02, 3, refresh, 0.7)
    for p, q, start in zip(a, b, parameters(SHAPES), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
        assert (p - start).abs().max() > 0.01


@pytest.mark.parametrize("refresh", [1, 100])
def test_it_is_pytorch_optimizers(refresh: int) -> None:
    other = pytest.importorskip("pytorch_optimizer")
    shapes = [(6, 9), (12, 6)]
    a, b = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    settings = {"rank": 3, "update_proj_gap": refresh, "scale": 0.5, "projection_type": "std"}
    theirs = other.GaLore([{"params": b, **settings}], lr=0.01, eps=1e-12)
    gradients = gradients_of(shapes, 6)
    step_along(b, gradients, theirs)
    step_along(a, gradients, GaLore(a, 0.01, eps=1e-12, rank=3, refresh_steps=refresh, scale=0.5, split=None))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_updates_have_the_rank_and_weights_do_not() -> None:
    (w,) = parameters([(8, 12)])
    start, optimizer = w.detach().clone(), GaLore([w], 0.1, rank=2, refresh_steps=1, split=None)
    before = start.clone()
    for step in range(3):
        w.grad = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        assert torch.linalg.matrix_rank(w.detach() - before, atol=1e-9) == 2
        before = w.detach().clone()
    assert torch.linalg.matrix_rank(w.detach() - start, atol=1e-9) == 6


def test_the_state_is_r_times_m_plus_2_n() -> None:
    params = parameters(SHAPES)
    optimizer = GaLore(params, rank=3, split=None)
    train(params, optimizer, steps=1)
    sizes = [sum(v.numel() for v in optimizer.state[p].values() if isinstance(v, Tensor)) for p in params]
    assert sizes == [3 * (6 + 18), 3 * (6 + 24), 3 * (8 + 16), 2 * 7]


def test_what_is_not_projected_is_stepped_as_by_adamw() -> None:
    shapes = [(7,), (3, 9), (8, 9)]  # the second has a side of no more than the rank
    a, b = parameters(shapes), parameters(shapes)
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    train(a, GaLore(a, rank=3, split=None, **settings))
    train(b, AdamW(b, **settings))
    for i in (0, 1):
        torch.testing.assert_close(a[i], b[i], rtol=1e-10, atol=1e-12)
    assert (a[2] - b[2]).abs().max() > 0.01


def test_convolutions_in_any_memory_format_are_matrices() -> None:
    a, b = parameters([(6, 2, 3, 3)]), parameters([(6, 18)])
    a[0].data = a[0].data.to(memory_format=torch.channels_last)
    b[0].data = a[0].detach().contiguous().flatten(1).clone()
    gradients = gradients_of([(6, 2, 3, 3)], 3)
    step_along(a, gradients, GaLore(a, 0.1, rank=2, split=None))
    step_along(b, [[g.flatten(1) for g in gradients[0]]], GaLore(b, 0.1, rank=2, split=None))
    torch.testing.assert_close(a[0].flatten(1), b[0], rtol=1e-9, atol=1e-10)


def test_a_gradient_that_is_not_finite_shows_in_the_weights() -> None:
    (w,) = parameters([(6, 8)])
    w.grad = torch.full_like(w, float("nan"))
    GaLore([w], rank=2, split=None).step()
    assert w.isnan().any()


def test_its_state_is_saved_and_loaded() -> None:
    a = parameters(SHAPES, torch.bfloat16)
    one = GaLore(a, rank=3, refresh_steps=3, split=None)
    train(a, one, steps=4)
    b = copy.deepcopy(a)
    two = GaLore(b, rank=3, refresh_steps=3, split=None)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for params, optimizer in ((a, one), (b, two)):
        train(params, optimizer, steps=4, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_it_replaces_the_optimizer_of_an_unchanged_module() -> None:
    build = lambda: [ReplaceOptimizer("galore", lr=0.01, rank=4, refresh_steps=5)]  # noqa: E731
    net, t = fit("tiny_gpt", build)
    assert t.global_step == 12 and differences(final_state(net, t), final_state(*fit("tiny_gpt", list))) != []
    combined: Any = t.optimizers[0]
    (optimizer,) = [part for part in combined.parts if isinstance(part, GaLore)]
    # attention's fused layer is three matrices, and each layer of the MLP one
    assert sum(f"basis_{j}" in state for state in optimizer.state.values() for j in range(3)) == 4 * (3 + 1 + 2)


class _Groups(TinyGPT):
    """Two groups, and a learning rate that the step itself writes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.01 / (batch_idx + 1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        few = [p for p in self.parameters() if p.ndim < 2]
        many = [p for p in self.parameters() if p.ndim > 1]
        optimizer = AdamW([{"params": many}, {"params": few, "weight_decay": 0.1}], lr=0.01)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}]


@pytest.mark.parametrize("replaces", [False, True])
def test_with_steps_in_the_backward_pass_it_ends_alike_and_releases_gradients(replaces: bool) -> None:
    class Net(TinyGPT):
        def configure_optimizers(self) -> GaLore:
            return GaLore(self, lr=0.01, rank=4, refresh_steps=2)

    ended, technique = [], OptimizerInBackward()
    for techniques in ([], [technique]):
        torch.manual_seed(0)
        net = _Groups() if replaces else Net()
        others = [ReplaceOptimizer("galore", lr=0.01, rank=4, refresh_steps=2)] if replaces else []
        t = trainer(*others, *techniques, max_steps=4)
        t.fit(net, loader("tiny_gpt"))
        ended.append(final_state(net, t))
    assert differences(*ended) == []
    assert technique.report()["released_bytes"] == sum(4 * p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "GaLore(rank=0): expected an integer >= 1"),
        ({"rank": 8}, "GaLore(rank=8): no matrix has two sides longer than this (shapes [(6, 9), (12, 6), (8, 8)])"),
        ({"scale": 0.0}, "GaLore(scale=0.0): expected a finite number > 0"),
        ({"refresh_steps": 0}, "GaLore(refresh_steps=0): expected an integer >= 1"),
    ],
)
def test_values_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GaLore(parameters(SHAPES), **settings)


def test_parameters_that_are_divided_over_ranks_are_refused(two_processes: dict[str, Any]) -> None:
    told = two_processes["muon"]["two_sided"]["refused"]
    assert re.search(r"GaLore: .+ of shape \(\d+, \d+\) is a DTensor, divided over ranks; expected whole", told)
    assert told.endswith("Use DDP, or Muon, SOAP or Shampoo, which divide the work.")
