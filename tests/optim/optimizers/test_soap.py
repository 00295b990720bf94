"""SOAP against the rule written out in float64, pytorch-optimizer, AdamW where it has no bases, and its equivariance."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import SOAP, ReplaceOptimizer
from tests.models import loader, make_batch, module, trainer
from tests.optim.optimizers.matrices import parameters, train
from tests.runs import checkpoints, differences, final_state, fit

SHAPES = [(6, 6), (12, 6), (6, 12), (6, 6)]


class Reference:
    """The paper's rule, matrix by matrix, with bases from a full eigendecomposition of its own at the first gradient."""

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float, b: Any, b3: float, refresh: int) -> None:
        self.params, self.lr, self.decay, self.b, self.b3, self.refresh = params, lr, decay, b, b3, refresh
        self.states: list[dict[str, Any]] = [{} for _ in params]

    def step(self) -> None:
        with torch.no_grad():
            for p, s in zip(self.params, self.states, strict=True):
                if p.grad is not None:
                    self.one(p, p.grad, s)

    def one(self, w: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        b1, b2 = self.b
        if not s:
            s["L"], s["R"] = (1 - self.b3) * g @ g.T, (1 - self.b3) * g.T @ g
            s["QL"], s["QR"] = (torch.linalg.eigh(x)[1].flip(1) for x in (s["L"], s["R"]))
            s["m"], s["v"], s["t"] = torch.zeros_like(w), torch.zeros_like(w), 0
            return
        s["t"] += 1
        ql, qr, t = s["QL"], s["QR"], s["t"]
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = b2 * s["v"] + (1 - b2) * (ql.T @ g @ qr) ** 2
        n = (ql.T @ s["m"] @ qr / (1 - b1**t)) / ((s["v"] / (1 - b2**t)).sqrt() + 1e-8)
        w.mul_(1 - self.lr * self.decay).sub_(self.lr * ql @ n @ qr.T)
        s["L"] = self.b3 * s["L"] + (1 - self.b3) * g @ g.T
        s["R"] = self.b3 * s["R"] + (1 - self.b3) * g.T @ g
        if t % self.refresh == 0:
            for c, q, dim in (("L", "QL", 0), ("R", "QR", 1)):
                order = torch.diag(s[q].T @ s[c] @ s[q]).argsort(descending=True)
                s["v"] = s["v"].index_select(dim, order)
                s[q] = torch.linalg.qr((s[c] @ s[q])[:, order])[0]


@pytest.mark.parametrize(("refresh", "b3"), [(1, 0.9), (3, 0.95), (100, 0.95)])
def test_it_is_the_papers_rule(refresh: int, b3: float) -> None:
    a, b = parameters(SHAPES), parameters(SHAPES)
    ours = SOAP(a, 0.02, (0.9, 0.95), weight_decay=0.1, covariance_beta=b3, refresh_steps=refresh, split=None)
    theirs = Reference(b, 0.02, 0.1, (0.9, 0.95), b3, refresh)
    train(a, ours, steps=1, seed=1)
    train(b, theirs, steps=1, seed=1)
    for p, s in zip(a, theirs.states, strict=True):
        # where a side is longer than the other, its basis is not unique yet
        ours.state[p]["basis_0_0"].copy_(s["QL"])
        ours.state[p]["basis_0_1"].copy_(s["QR"])
    train(a, ours)
    train(b, theirs)
    for p, q, start in zip(a, b, parameters(SHAPES), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-9)
        assert (p - start).abs().min() > 0


def test_it_is_pytorch_optimizers_on_matrices_and_convolutions() -> None:
    other = pytest.importorskip("pytorch_optimizer")
    shapes = [*SHAPES, (5, 4, 3, 2)]
    a, b = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    ours = SOAP(a, 0.01, weight_decay=0.0, refresh_steps=3, merge=1, split=None)
    theirs = other.SOAP(b, lr=0.01, weight_decay=0.0, precondition_frequency=3)
    for step in range(8):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for p, q in zip(a, b, strict=True) if step == 0 else ():
            for dim, basis in enumerate(theirs.state[q]["Q"]):  # not unique yet where a side is the longest
                ours.state[p][f"basis_0_{dim}"].copy_(basis)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)


def test_without_bases_it_is_adamw_that_leaves_out_the_first_gradient() -> None:
    a, b = parameters(SHAPES), parameters(SHAPES)
    train(a, SOAP(a, 0.02, (0.8, 0.9), 1e-6, 0.3, max_dim=1, split=None), steps=1, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    ours = SOAP(a, 0.02, (0.8, 0.9), 1e-6, 0.3, max_dim=5, split=None)
    train(a, ours, steps=1, seed=1)
    train(a, ours)
    train(b, torch.optim.AdamW(b, 0.02, (0.8, 0.9), 1e-6, 0.3))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_what_is_no_matrix_is_stepped_as_by_adamw_and_groups_stay_as_they_are() -> None:
    shapes = [(7,), (6, 6), (5,), (4, 6)]
    a, b = parameters(shapes), parameters(shapes)
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    groups = [{"params": a[:2], "lr": 0.03}, {"params": [a[2]], "weight_decay": 0.0}]
    ours = SOAP([*groups, {"params": [a[3]], "algorithm": "adamw"}], **settings)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in ours.param_groups] == [
        (2, 0.03, 0.2),
        (1, 0.01, 0.0),
        (1, 0.01, 0.2),
    ]
    train(a, ours)
    groups = [{"params": b[:1], "lr": 0.03}, {"params": [b[2]], "weight_decay": 0.0}, {"params": [b[3]]}]
    train(b, torch.optim.AdamW(groups, **settings))
    for i in (0, 2, 3):
        torch.testing.assert_close(a[i], b[i], rtol=1e-10, atol=1e-12)
    assert (a[1] - b[1]).abs().max() > 0.01


def test_turning_either_side_of_the_problem_turns_the_steps() -> None:
    """Adam in the eigenbasis does not know in which basis gradients are written down, as Adam does."""
    (w,) = parameters([(6, 6)])
    u, v = (
        torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k)))[0]
        for k in (1, 2)
    )
    turned = nn.Parameter(u @ w.detach() @ v.T)
    one, two = SOAP([w], 0.1, refresh_steps=2, split=None), SOAP([turned], 0.1, refresh_steps=2, split=None)
    start = w.detach().clone()
    for step in range(7):
        w.grad = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        turned.grad = u @ w.grad @ v.T
        one.step()
        two.step()
    torch.testing.assert_close(u @ w @ v.T, turned.detach(), rtol=1e-6, atol=1e-7)
    assert (w - start).abs().max() > 0.2


def test_bases_turn_to_the_eigenvectors() -> None:
    """Fed with one covariance for long, refreshes bring both bases to its eigenvectors, largest first."""
    (w,) = parameters([(5, 3)])
    optimizer = SOAP([w], 0.01, refresh_steps=1, split=None)
    for step in range(300):
        noise = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step % 20))
        w.grad = noise * torch.tensor([1.0, 2, 4, 8, 16]).unsqueeze(1) * torch.tensor([1.0, 3, 9])
        optimizer.step()
    for dim in (0, 1):
        c, q = optimizer.state[w][f"covariance_0_{dim}"], optimizer.state[w][f"basis_0_{dim}"]
        inside = q.T @ c @ q
        eigenvalues = inside.diagonal()
        assert (eigenvalues[:-1] > eigenvalues[1:]).all()
        assert (inside - inside.diagonal().diag()).norm() < 0.1 * eigenvalues.norm()
        torch.testing.assert_close(q.T @ q, torch.eye(q.shape[0], dtype=torch.float64))


def test_fused_projections_stacks_and_convolutions_are_folded() -> None:
    (fused,) = parameters([(18, 6)])
    apart = [nn.Parameter(part.detach().clone()) for part in fused.split(6)]
    experts = nn.Parameter(torch.randn(3, 4, 5))
    alone = [nn.Parameter(e.clone()) for e in experts.detach()]
    kernel = torch.randn(4, 3, 2, 2)
    conv, last = nn.Parameter(kernel.clone()), nn.Parameter(kernel.clone().to(memory_format=torch.channels_last))
    flat = nn.Parameter(kernel.flatten(1).clone())
    linear = nn.Parameter(kernel.flatten(1).clone())
    pairs = [
        (SOAP([("blocks.0.qkv.weight", fused), ("mlp.experts.up", experts), ("conv", conv)]), [fused, experts, conv]),
        (SOAP([*apart, *alone, flat], split=None), [*apart, *alone, flat]),
        (SOAP([last], split=None), [last]),
        (SOAP([linear], split=None), [linear]),
    ]
    for step in range(3):
        g = [torch.randn(s, generator=torch.Generator().manual_seed(step)) for s in ((18, 6), (3, 4, 5), (4, 3, 2, 2))]
        for p, grad in zip(
            (fused, experts, conv, last, flat, linear), (*g, g[2], g[2].flatten(1), g[2].flatten(1)), strict=True
        ):
            p.grad = grad.to(p.dtype).clone()
        for p, grad in zip((*apart, *alone), (*fused.grad.split(6), *experts.grad.unbind()), strict=True):
            p.grad = grad.clone()
        for optimizer, _ in pairs:
            optimizer.step()
    torch.testing.assert_close(fused.detach(), torch.cat(apart))
    torch.testing.assert_close(experts.detach(), torch.stack(alone))
    for p in (conv, last):
        torch.testing.assert_close(p.detach().flatten(1), flat.detach())
    assert last.is_contiguous(memory_format=torch.channels_last) and not torch.equal(conv, kernel)
    # above `merge` the kernel is a side of its own, and above `max_dim` a side has no basis
    for settings, sizes in (({"merge": 8}, {4, 3}), ({"merge": 1}, {4, 3, 2}), ({"max_dim": 11}, {4})):
        p = nn.Parameter(kernel.clone())
        p.grad = kernel.clone()
        optimizer = SOAP([p], split=None, **settings)
        optimizer.step()
        found = [value.shape for name, value in optimizer.state[p].items() if name.startswith("basis")]
        assert {shape[0] for shape in found} == sizes and all(len(shape) == 2 for shape in found)


@pytest.mark.parametrize("name", ["gpt2", "vit", "bert", "tiny_gpt"])
def test_modules_bring_their_matrices_and_train(name: str) -> None:
    net = module(name)
    net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = SOAP(net, lr=1e-2)
    assert len(optimizer.param_groups) == 1
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = net.training_step(make_batch(name), 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    folded = {n for n, p in net.named_parameters() if "basis_0_0" in optimizer.state[p]}
    assert len(folded) >= 16 and not [n for n in folded if "embed" in n or "head" in n or "wte" in n]


def test_vectors_have_bases_where_asked() -> None:
    (p,) = parameters([(5,)])
    optimizer = SOAP([p], vectors=True)
    train([p], optimizer, steps=3)
    assert optimizer.state[p]["basis_0_0"].shape == (5, 5)


def test_a_closure_is_evaluated_with_gradients_and_empty_steps_pass() -> None:
    (w,) = parameters([(4, 4)])
    optimizer = SOAP([w], 0.1, split=None)
    optimizer.step()
    assert not optimizer.state

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss.detach()

    first = float(optimizer.step(closure))
    assert float([optimizer.step(closure) for _ in range(20)][-1]) < first


def test_gradients_that_are_not_finite_show_in_the_weights() -> None:
    for poisoned in (0, 2):
        (w,) = parameters([(4, 4)])
        optimizer = SOAP([w], 0.1, refresh_steps=1, split=None)
        for step in range(5):
            w.grad = torch.full((4, 4), float("nan"), dtype=w.dtype) if step == poisoned else torch.randn_like(w)
            optimizer.step()
        assert w.isnan().all()


# -- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_its_state_loads_bit_for_bit_and_survives_copies(dtype: torch.dtype) -> None:
    params = parameters([(6, 6), (5, 3, 2), (4,)], dtype)
    optimizer = SOAP(params, 0.01, refresh_steps=2)
    train(params, optimizer, steps=3)
    assert optimizer.state[params[0]]["basis_0_0"].dtype == torch.promote_types(dtype, torch.float32)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = SOAP(others, 0.01, refresh_steps=2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, copied_params = copy.deepcopy((optimizer, params))
    pickled, pickled_params = pickle.loads(pickle.dumps((optimizer, params)))
    expected = train(params, optimizer, steps=5)
    for held, one in ((others, again), (copied_params, copied), (pickled_params, pickled)):
        assert all(torch.equal(x, y) for x, y in zip(train(held, one, steps=5), expected, strict=True))


def test_it_trains_and_resumes_in_an_unchanged_module(tmp_path: Path) -> None:
    """By its class path, under clipping and accumulation; bit for bit from every other checkpoint."""

    def run(**kwargs: Any) -> dict[str, Tensor]:
        other = {"class_path": "lightning_eff.SOAP", "init_args": {"lr": 0.01, "refresh_steps": 2}}
        build = lambda: [ReplaceOptimizer(other, "matrices")]  # noqa: E731
        return final_state(
            *fit("tiny_gpt", build, gradient_clip_val=0.5, accumulate_grad_batches=2, max_steps=6, **kwargs)
        )

    whole = run(directory=tmp_path)
    assert any("basis" in name for name in whole)
    for path in checkpoints(tmp_path)[::2]:
        assert differences(whole, run(resume=path)) == []
        assert torch.load(path, weights_only=True)["optimizer_states"]


def test_it_is_plain_in_configure_optimizers() -> None:
    pl.seed_everything(1, verbose=False)
    net = module("classifier")
    net.configure_optimizers = lambda: SOAP(net.named_parameters(), lr=0.01)  # type: ignore[method-assign]
    t = trainer(max_steps=4)
    t.fit(net, loader("classifier", 64))
    assert t.global_step == 4


# -- what it refuses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"SOAP\(lr=-1.0\): expected a finite number >= 0"),
        (
            {"betas": (0.9, 1.0)},
            r"SOAP\(betas=\(0.9, 1.0\)\): expected 2 values, each a number in \[0, 1\)",
        ),
        ({"covariance_beta": 1.0}, r"SOAP\(covariance_beta=1.0\): expected a number in \[0, 1\)"),
        ({"refresh_steps": 0}, r"SOAP\(refresh_steps=0\): expected an integer >= 1"),
        ({"max_dim": 2.5}, "max_dim=2.5"),
        ({"merge": 0}, "merge=0"),
        ({"split": 3}, "split=3"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOAP(parameters(SHAPES), **settings)


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="no hidden matrix among 1 parameters"):
        SOAP([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match='"algorithm": \'muon\'; expected "soap"'):
        SOAP([{"params": parameters(SHAPES), "algorithm": "muon"}])
    with pytest.raises(ValueError, match=r"holds a parameter of shape \(3,\); expected two dimensions"):
        SOAP([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "soap"}])
    with pytest.raises(ValueError, match="is complex; expected real"):
        SOAP([nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))])
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = SOAP(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"SOAP: the gradient of a parameter of shape \(5, 4\) is sparse. Set sparse=False in"
    ):
        optimizer.step()


# -- over ranks


@pytest.fixture(scope="module")
def two(two_processes: dict[str, Any]) -> dict[str, Any]:
    return two_processes["muon"]


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_ranks_end_alike(two: dict[str, Any], name: str) -> None:
    assert two["two_sided"][name] == {"alike": True, "moved": True}
