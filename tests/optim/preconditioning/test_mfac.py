"""M-FAC against the inverse written out, and the paper's recursion on whole vectors."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import MFAC
from lightning_eff._core.session import Session
from lightning_eff.optim.preconditioning import _gradients
from lightning_eff.optim.preconditioning.mfac import inverse_weights
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import TinyClassifier, flat, hugging_face, loader, module, trainer
from tests.optim.preconditioning.test_gradients import built, still
from tests.runs import fit, fit_yaml

CASES = {
    "MFAC": Case(
        active=lambda: MFAC(num_gradients=5, damping=1e-2),
        neutral=lambda: MFAC(num_gradients=0),
        anywhere=True,
    )
}

# -- the rule


def explicit(gradients: Tensor, *, damping: float, num_gradients: int) -> Tensor:
    """``(lambda I + (1/m) G^T G)^-1`` in float64, of ``G`` of shape (k, d)."""
    g = gradients.double()
    return torch.linalg.inv(damping * torch.eye(g.shape[1], dtype=g.dtype) + g.T @ g / num_gradients)


@pytest.mark.parametrize("damping", [1e-6, 1e-2, 10.0])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 8), (5, 8), (8, 8), (40, 40)])
def test_it_is_the_explicit_inverse(k: int, m: int, damping: float) -> None:
    torch.manual_seed(k)
    g, settings = torch.randn(k, 20, dtype=torch.float64), {"damping": damping, "num_gradients": m}
    expected = g @ explicit(g, damping=damping, num_gradients=m)
    found = torch.stack([inverse_weights(g @ g.T, i, damping=damping, num_gradients=m) @ g for i in range(k)])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()), msg=str(settings))


def test_it_is_the_papers_recursion() -> None:
    """One gradient after another, each ``F_{j-1}^-1 g_j`` a vector of its own, and the pivots are its denominators."""
    torch.manual_seed(0)
    g, damping, m = torch.randn(6, 20, dtype=torch.float64), 0.01, 8

    def times(y: Tensor) -> Tensor:
        return y / damping - sum((v * (v @ y) / denominator for v, denominator in vectors), torch.zeros(20))

    vectors: list[tuple[Tensor, Tensor]] = []
    for g_j in g:
        v = times(g_j)
        vectors.append((v, m + g_j @ v))
    w = inverse_weights(g @ g.T, 2, damping=damping, num_gradients=m)
    torch.testing.assert_close(w @ g, times(g[2]), rtol=1e-10, atol=1e-10)
    pivots = torch.linalg.cholesky(damping * torch.eye(6, dtype=torch.float64) + g @ g.T / m).diagonal() ** 2
    torch.testing.assert_close(pivots * m / damping, torch.stack([denominator for _, denominator in vectors]))


class Alike(pl.LightningModule):
    """Gradients that are large and nearly the same: their products in float32 tell them apart by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(400))
        self.gradients = 1e4 * (torch.randn(400) + 1e-4 * torch.randn(20, 400))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.gradients[batch_idx] @ self.w

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


def test_what_products_in_float32_cannot_tell_is_damped() -> None:
    torch.manual_seed(0)
    net, technique = Alike(), MFAC(num_gradients=20, damping=1e-6)
    gram = (net.gradients @ net.gradients.T).double()
    assert not inverse_weights(gram, 0, damping=1e-6, num_gradients=20).isfinite().all(), "what it is about"
    trainer(technique, max_steps=20).fit(net, loader("classifier", 80))
    told = technique.report()
    assert told["rewritten"] == 20 and 0 < float(told["cosine"]) <= 1
    assert float(told["damping"]) == pytest.approx(2.0**-23 * float(gram.diagonal().max()), rel=1e-5)


# -- in a run


def by_hand(net: Any, batches: list[Any], *, m: int, damping: float, accumulate: int, clip: float, norm: str) -> None:
    """SGD along ``F^-1 g`` by the explicit inverse, without Lightning."""
    optimizer, parameters, seen = net.configure_optimizers(), list(net.parameters()), []
    for index, batch in enumerate(batches):
        (net.training_step(batch, index) / accumulate).backward()
        if (index + 1) % accumulate:
            continue
        g = torch.cat([p.grad.flatten() for p in parameters])
        seen.append(g)
        direction = (explicit(torch.stack(seen[-m:]), damping=damping, num_gradients=m) @ g.double()).float()
        if norm == "gradient":
            direction *= g.norm() / direction.norm()
        for p, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p))
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("norm", ["gradient", "inverse"])
def test_a_run_steps_along_the_explicit_inverse(norm: Any) -> None:
    """Over more steps than there are in the window, with windows of two batches, momentum and clipping."""
    data, net, reference = loader("classifier", 96, shuffle=False), still(module_of(), 0.9), still(module_of(), 0.9)
    settings: Any = {"damping": 1e-3, "norm": norm}
    clip = 0.5 if norm == "gradient" else 2.0
    technique = MFAC(num_gradients=5, **settings)
    start = flat(net)
    trainer(technique, max_steps=12, accumulate_grad_batches=2, gradient_clip_val=clip).fit(net, data)
    by_hand(reference, list(data), m=5, accumulate=2, clip=clip, **settings)
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-3, atol=1e-5)
    assert (flat(net) - start).abs().max() > 0.05
    told = technique.report()
    assert told["rewritten"] == 12 and told["window"] == 5 and 0 < float(told["cosine"]) < 0.999
    if norm == "gradient":
        assert float(told["direction_norm"]) == pytest.approx(float(told["gradient_norm"]), rel=1e-5)


def module_of(name: str = "classifier") -> Any:
    pl.seed_everything(1, verbose=False)
    return module(name)


def test_large_damping_is_the_plain_gradient() -> None:
    nets = [built(), built()]
    trainer(max_steps=6).fit(nets[0], loader("classifier", shuffle=False))
    trainer(MFAC(damping=1e9), max_steps=6).fit(nets[1], loader("classifier", shuffle=False))
    torch.testing.assert_close(flat(nets[1]), flat(nets[0]), rtol=1e-5, atol=1e-6)


class Experts(pl.LightningModule):
    """Of two experts, batches in turn call one; the other has no gradient then."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.experts[batch_idx % 2](self.frozen(self.shared(batch[0])).tanh())
        return nn.functional.cross_entropy(h, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_parameter_without_a_gradient_counts_as_zero_and_stays() -> None:
    pl.seed_everything(1, verbose=False)
    net, technique, data = Experts(), MFAC(num_gradients=3, damping=1e-2), loader("classifier", 24, shuffle=False)
    reference = Experts()
    reference.load_state_dict(net.state_dict())
    trainer(technique, max_steps=6).fit(net, data)
    named = [(name, p) for name, p in reference.named_parameters() if p.requires_grad]
    rows: list[Tensor] = []
    for index, batch in enumerate(data):
        reference.zero_grad()
        reference.training_step(batch, index).backward()
        g = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for _, p in named])
        rows.append(g)
        direction = (explicit(torch.stack(rows[-3:]), damping=1e-2, num_gradients=3) @ g.double()).float()
        parts = direction.split([p.numel() for _, p in named])
        given = [(p, part) for (_, p), part in zip(named, parts, strict=True) if p.grad is not None]
        length = torch.cat([part for _, part in given]).norm()
        with torch.no_grad():
            for p, part in given:
                p -= 0.1 * (g.norm() / length * part).view_as(p)
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-4, atol=1e-6)
    assert set(technique.state_dict()["rows"]) == {name for name, _ in named}


def test_parameters_that_are_stepped_later_join_the_window() -> None:
    class Unfreezes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                pl_module.head.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(pl_module.head.parameters())})

    net, technique = built(), MFAC(num_gradients=4)
    net.head.requires_grad_(False)
    net.configure_optimizers = lambda: torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    trainer(technique, Unfreezes(), max_steps=4).fit(net, loader("classifier"))
    rows = technique.state_dict()["rows"]["head.1.weight"]
    assert [bool(row.any()) for row in rows] == [False, False, True, True]


def test_another_network_begins_another_window() -> None:
    class Grows(Nop):
        def on_batch_end(self, session: Session, batch_idx: int) -> None:
            if session.trainer.global_step == 4:
                session.blocks_changed(self)

    technique = MFAC(num_gradients=6)
    fit("tiny_gpt", lambda: [technique, Grows()], max_steps=6)
    assert technique.report()["window"] == 2 and technique.report()["rewritten"] == 6


@pytest.mark.parametrize(("seen", "m", "kept"), [(7, 4, 4), (7, 3, 3), (7, 9, 4), (2, 9, 2), (2, 2, 2), (7, 0, 0)])
def test_a_window_of_another_size_takes_up_the_newest(seen: int, m: int, kept: int) -> None:
    """Of a window of 4 after so many steps, whose gradients are 0, 1, 2, ..."""
    held = min(seen, 4)
    rows = torch.tensor([[float(max(i for i in range(seen) if i % 4 == row))] for row in range(held)])
    state = {**MFAC(num_gradients=4).state_dict(), "seen": seen, "rows": {"w": rows}, "gram": (rows @ rows.T).double()}
    technique = MFAC(num_gradients=m)
    technique.load_state_dict(state)
    found = technique.state_dict()
    newest = [] if kept == 0 else found["rows"]["w"].flatten().tolist()
    assert sorted(newest) == list(map(float, range(seen - kept, seen)))
    assert m == 0 or torch.equal(found["gram"], torch.outer(torch.tensor(newest), torch.tensor(newest)).double())
    if kept == m == 3 or m == 9:
        assert found["seen"] == kept and newest == sorted(newest), "the next one is put after them, or over the oldest"


# -- memory, and what is said


def test_what_it_takes_is_said_and_what_it_takes_is_that(caplog: pytest.LogCaptureFixture) -> None:
    net, technique = hugging_face("gpt2"), MFAC(num_gradients=7)
    with caplog.at_level("INFO"):
        trainer(technique, max_steps=8).fit(net, loader("gpt2"))
    size = sum(p.numel() for p in net.parameters())
    rows = technique.state_dict()["rows"]
    assert sum(r.numel() * r.element_size() for r in rows.values()) == 7 * size * 4
    assert f"MFAC: 7 vectors of {size:,} parameters take {7 * size * 4 / 2**20:.2f} MiB on cpu" in caplog.text
    assert "preconditioned 8 steps by the last 7 gradients, which take" in technique.summary()


def test_what_does_not_fit_is_refused_before_anything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gradients, "free_bytes", lambda device: 10_000)
    with pytest.raises(
        ValueError, match=r"MFAC\(num_gradients=128\): 128 vectors of 259 .* 129\.50 KiB on cpu, which "
    ):
        trainer(MFAC(), max_steps=1).fit(TinyClassifier(), loader("classifier"))
    trainer(MFAC(num_gradients=9), max_steps=1).fit(TinyClassifier(), loader("classifier"))
    monkeypatch.setattr(_gradients, "free_bytes", lambda device: None)
    trainer(MFAC(), max_steps=1).fit(TinyClassifier(), loader("classifier"))


def test_a_checkpoint_holds_the_gradients_that_there_are(tmp_path: Path) -> None:
    fit("classifier", lambda: [MFAC(num_gradients=100)], directory=tmp_path, max_steps=2)
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["callbacks"]
    rows = next(value for key, value in saved.items() if key.startswith("MFAC"))["rows"]
    assert {len(r) for r in rows.values()} == {1} and all(
        r.untyped_storage().nbytes() == r.nbytes for r in rows.values()
    )


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "MFAC", {"num_gradients": 2, "damping": 0.01, "norm": "inverse"}, max_steps=3)
    assert "M-FAC: preconditioned 3 steps by the last 2 gradients" in capsys.readouterr().out


# -- bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_gradients": -1}, r"MFAC\(num_gradients=-1\): expected an integer >= 0"),
        ({"num_gradients": True}, r"MFAC\(num_gradients=True\): expected an integer >= 0"),
        ({"num_gradients": 2.0}, r"MFAC\(num_gradients=2.0\): expected an integer >= 0"),
        ({"damping": 0.0}, r"MFAC\(damping=0.0\): expected a finite number > 0"),
        ({"damping": float("nan")}, r"MFAC\(damping=nan\): expected a finite number > 0"),
        ({"norm": "fisher"}, r"MFAC\(norm=\'fisher\'\): expected 'gradient' or 'inverse'"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MFAC(**kwargs)
