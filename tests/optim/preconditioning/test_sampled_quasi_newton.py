"""Sampled quasi-Newton: secant equations, the matrices written out, Newton's step on a quadratic, and a loop by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import SampledQuasiNewton
from lightning_eff._core import rng
from lightning_eff._core.session import Session
from lightning_eff._core.wrapping import is_unrounded
from lightning_eff.optim.preconditioning import _gradients
from lightning_eff.optim.preconditioning._inverse_hessians import lbfgs_weights, lsr1_weights
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import TinyClassifier, flat, loader, module, trainer
from tests.optim.preconditioning.test_gradients import still
from tests.optim.sharpness.test_sharpness_aware_minimization import SeedOnce
from tests.runs import fit, fit_yaml, resume_from_batches

CASES = {
    "SampledQuasiNewton": Case(
        active=lambda: SampledQuasiNewton(num_directions=2, interval=5),
        neutral=lambda: SampledQuasiNewton(num_directions=0),
        anywhere=True,
    )
}

# -- the rule


def pairs(m: int = 5, d: int = 12, *, definite: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """A Hessian (d, d), and m directions with their curvature along it, (m, d)."""
    torch.manual_seed(m)
    a = torch.randn(d, d, dtype=torch.float64)
    hessian = a @ a.T / d + 0.1 * torch.eye(d) if definite else (a + a.T) / 2
    s = torch.randn(m, d, dtype=torch.float64)
    return hessian, s, s @ hessian


def times(rule: Any, g: Tensor, s: Tensor, y: Tensor, epsilon: float = 1e-8) -> tuple[Tensor, int]:
    """``H g`` as the module has it, and how many pairs counted."""
    basis = torch.cat([g[None], s, y])
    w, counted = rule(basis @ basis.T, epsilon=epsilon)
    return w @ basis, counted


def test_lbfgs_is_the_product_of_its_matrices() -> None:
    """``H <- (I - rho s y^T) H (I - rho y s^T) + rho s s^T``, written out."""
    _, s, y = pairs()
    g, one = torch.randn(12, dtype=torch.float64), torch.eye(12, dtype=torch.float64)
    h = one * (s[-1] @ y[-1]) / (y[-1] @ y[-1])
    for a, b in zip(s, y, strict=True):
        v = one - torch.outer(a, b) / (a @ b)
        h = v @ h @ v.T + torch.outer(a, a) / (a @ b)
    found, counted = times(lbfgs_weights, g, s, y)
    torch.testing.assert_close(found, h @ g, rtol=1e-9, atol=1e-9)
    assert counted == 5
    assert (torch.linalg.eigvalsh((h + h.T) / 2) > 0).all()


def test_lbfgs_keeps_the_secant_equation_of_the_newest_pair() -> None:
    _, s, y = pairs()
    found, _ = times(lbfgs_weights, y[-1], s, y)
    torch.testing.assert_close(found, s[-1], rtol=1e-9, atol=1e-9)
    other, _ = times(lbfgs_weights, y[0], s, y)
    assert (other - s[0]).abs().max() > 1e-3


@pytest.mark.parametrize("definite", [True, False])
def test_lsr1_is_its_updates_and_keeps_all_secant_equations(definite: bool) -> None:
    _, s, y = pairs(definite=definite)
    h = torch.eye(12, dtype=torch.float64) * ((s[-1] @ y[-1]) / (y[-1] @ y[-1])).abs()
    for a, b in zip(s, y, strict=True):
        v = a - h @ b
        h = h + torch.outer(v, v) / (v @ b)
    for i in range(5):
        found, counted = times(lsr1_weights, y[i], s, y)
        torch.testing.assert_close(found, s[i], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, h @ y[i], rtol=1e-6, atol=1e-6)
        assert counted == 5


def test_lsr1_begins_positive_where_the_last_pairs_curvature_is_negative() -> None:
    _, s, y = pairs(m=1, definite=False)
    y = y * -(s[0] @ y[0]).sign()
    g, first = torch.randn(12, dtype=torch.float64), ((s[0] @ y[0]) / (y[0] @ y[0])).abs()
    v = s[0] - first * y[0]
    expected = first * g + v * (v @ g) / (v @ y[0])
    torch.testing.assert_close(times(lsr1_weights, g, s, y)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("definite", [True, False])
def test_lsr1_of_as_many_directions_as_dimensions_is_the_inverse_hessian(definite: bool) -> None:
    hessian, s, y = pairs(m=12, definite=definite)
    g = torch.randn(12, dtype=torch.float64)
    found, _ = times(lsr1_weights, g, s, y)
    torch.testing.assert_close(found, torch.linalg.solve(hessian, g), rtol=1e-5, atol=1e-5)


def test_pairs_that_say_nothing_good_are_passed_over() -> None:
    _, s, y = pairs()
    g = torch.randn(12, dtype=torch.float64)
    bad = y.clone()
    bad[2] = -bad[2]  # negative curvature
    bad[4] = 0.0
    found, counted = times(lbfgs_weights, g, s, bad)
    expected, _ = times(lbfgs_weights, g, s[[0, 1, 3]], y[[0, 1, 3]])
    torch.testing.assert_close(found, expected)
    assert counted == 3
    threshold = float(s[1] @ y[1] / (s[1] @ s[1]))
    assert times(lbfgs_weights, g, s[1:2], y[1:2], threshold * 1.01)[1] == 0
    assert times(lbfgs_weights, g, s[1:2], y[1:2], threshold * 0.99)[1] == 1
    twice, counted = times(lsr1_weights, g, torch.cat([s, s[:1]]), torch.cat([y, y[:1]]))  # v = 0 the second time
    assert counted == 5 and twice.isfinite().all()
    assert torch.equal(times(lbfgs_weights, g, s, torch.zeros_like(y))[0], g)
    assert torch.equal(times(lsr1_weights, g, s, torch.zeros_like(y))[0], g)


# -- in a run


class Quadratic(pl.LightningModule):
    """``w^T A w / 2 - b^T w`` under SGD of rate 1."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        a = torch.randn(d, d, dtype=torch.float64)
        self.a, self.b = a @ a.T / d + torch.eye(d), torch.randn(d, dtype=torch.float64)
        self.w = nn.Parameter(torch.randn(d, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", loss := self.w @ self.a @ self.w / 2 - self.b @ self.w)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_on_a_quadratic_is_newtons_where_directions_span_it(accumulate: int) -> None:
    net = Quadratic()
    technique = SampledQuasiNewton(method="lsr1", num_directions=6, norm="inverse")
    t = trainer(technique, max_steps=1, accumulate_grad_batches=accumulate)
    t.fit(net, DataLoader(torch.zeros(accumulate, 1)))
    torch.testing.assert_close(net.w.detach(), torch.linalg.solve(net.a, net.b), rtol=1e-6, atol=1e-6)
    assert technique.report()["pairs"] == 6 and technique.report()["passes"] == 7 * accumulate
    session = technique._past
    assert session is not None
    assert session.chain.cost.forward_passes == session.chain.cost.backward_passes == 7 * accumulate


class Odd(pl.LightningModule):
    """A sparse table, complex weights, and a step without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = nn.Embedding(5, 8, sparse=True), nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
        self._unrounded: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self._unrounded.append(is_unrounded())
        if batch_idx == 1:
            return None
        return ((batch[0] + self.table(batch[1])).to(torch.complex64) @ self.w).abs().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.filterwarnings("ignore:.training_step. returned")
def test_sparse_and_complex_parameters_and_steps_without_a_loss() -> None:
    net, technique = Odd(), SampledQuasiNewton(num_directions=2, interval=1)
    trainer(technique, max_steps=3).fit(net, loader("classifier"))
    assert technique._y["w"].shape == (2, 48) and technique._y["table.weight"].shape == (2, 40)
    assert all(bool(y.any(1).all()) for y in technique._y.values())
    assert technique.report()["rewritten"] >= 2
    assert net._unrounded[:4] == [True, True, True, False], "differences are taken without plugins' rounding"


def test_a_step_that_was_not_finite_has_its_directions_drawn_anew() -> None:
    class Breaks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 0 and self.trainer.current_epoch == 0 else loss

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            for p in self.parameters():
                p.grad = None if p.grad is None else p.grad.nan_to_num(0.0, 0.0, 0.0)

    technique = SampledQuasiNewton(num_directions=1, interval=100)
    trainer(technique, max_steps=4).fit(still(Breaks()), loader("classifier"))
    told = technique.report()
    assert (told["left"], told["rewritten"], told["passes"]) == (1, 3, 4)


class Watch(pl.Callback):
    """Notes the directions and curvature of each step."""

    def __init__(self, technique: SampledQuasiNewton) -> None:
        self.technique, self.seen = technique, list[tuple[Tensor, Tensor]]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        t = self.technique
        self.seen.append(tuple(torch.cat([x[n] for n in t._s], 1).clone() for x in (t._s, t._y)))


def run(net: Any, data: Any, technique: SampledQuasiNewton, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    watch = Watch(technique)
    trainer(technique, watch, SeedOnce(), **kwargs).fit(net, data)
    return watch.seen


@pytest.mark.parametrize("method", ["lbfgs", "lsr1"])
def test_a_run_is_the_loop_by_hand(method: Any) -> None:
    """Windows of two batches, momentum, clipping, BatchNorm, dropout; directions are drawn at every second step."""
    nets = []
    for _ in range(2):
        pl.seed_everything(1, verbose=False)
        nets.append(TinyClassifier(momentum=0.9).double())
    net, reference = nets
    data = [(x.double(), y) for x, y in loader("classifier", 48, shuffle=False)]
    technique = SampledQuasiNewton(method=method, num_directions=3, interval=2, radius=0.01)
    settings: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    seen = run(net, DataLoader(data, batch_size=None), technique, max_steps=6, **settings)
    directions = [s for s, _ in seen[1::2]]
    assert torch.equal(directions[0], directions[1]) and not torch.equal(directions[1], directions[2])
    torch.testing.assert_close(directions[0].norm(dim=1), torch.full((3,), 0.01, dtype=torch.float64))

    optimizer, parameters = reference.configure_optimizers(), list(reference.parameters())
    torch.manual_seed(100)
    left, y = 0, torch.zeros(0)
    rule = lbfgs_weights if method == "lbfgs" else lsr1_weights
    for step in range(6):
        s = directions[step]
        plain, moved = [], []
        for batch in data[2 * step : 2 * step + 2]:
            state = torch.get_rng_state()
            if step % 2 == 0:
                moved.append(torch.stack([gradient(reference, batch, row, state) for row in s]))
                torch.set_rng_state(state)
            plain.append(gradient(reference, batch, None, state, keep=True))
        g = torch.stack(plain).mean(0)
        if step % 2 == 0:
            y = torch.stack(moved).mean(0) - g
        direction, _ = times(rule, g, s, y)
        if direction @ g > 0:
            g = direction * g.norm() / direction.norm()
        else:
            left += 1
        for p, part in zip(parameters, g.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-6, atol=1e-8)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, dict(reference.named_buffers())[name])
    assert technique.report()["left"] == left and technique.report()["passes"] == 3 * 2 * 4


def gradient(net: Any, batch: Any, at: Tensor | None, state: Tensor, *, keep: bool = False) -> Tensor:
    """Of the step's loss at ``w + at``, from this random state; buffers stay unless they are to be kept."""
    parameters, buffers = list(net.parameters()), {name: b.clone() for name, b in net.named_buffers()}
    before = [p.detach().clone() for p in parameters]
    torch.set_rng_state(state)
    with torch.no_grad():
        for p, part in zip(
            parameters, [] if at is None else at.split([p.numel() for p in parameters]), strict=at is not None
        ):
            p += part.view_as(p)
    found = torch.autograd.grad(net.training_step(batch, 0), parameters)
    with torch.no_grad():
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        for name, b in net.named_buffers():
            b.copy_(b if keep else buffers[name])
    return torch.cat([x.flatten() for x in found])


def test_differences_are_taken_without_autocast_and_a_scaler() -> None:
    class Looks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            autocast.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

    autocast: list[bool] = []
    pl.seed_everything(1, verbose=False)
    technique = SampledQuasiNewton(num_directions=2, interval=2)
    found = run(still(Looks()), loader("classifier", shuffle=False), technique, max_steps=2, precision="bf16-mixed")
    assert autocast == [False, False, False, True, True]
    pl.seed_everything(1, verbose=False)
    plain = run(
        still(TinyClassifier()), loader("classifier", shuffle=False), SampledQuasiNewton(num_directions=2), max_steps=1
    )
    assert torch.equal(found[0][1], plain[0][1])


def test_logs_and_random_numbers_and_weights_are_those_of_one_pass() -> None:
    class Logs(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            states.append(rng.capture()["torch"])
            weights.append(flat(self))
            return loss

    states: list[Tensor] = []
    weights: list[Tensor] = []
    pl.seed_everything(1, verbose=False)
    net, technique = Logs(), SampledQuasiNewton(num_directions=2, interval=1, radius=3.0)
    t = trainer(technique, max_steps=1)
    t.fit(net, loader("classifier"))
    assert len(states) == 4 and all(torch.equal(state, states[0]) for state in states)
    assert torch.equal(weights[0], weights[3]) and not torch.equal(weights[0], weights[1])
    assert (weights[1] - weights[0]).norm() == pytest.approx(3.0, rel=1e-4)
    pl.seed_everything(1, verbose=False)
    plain = trainer(max_steps=1)
    plain.fit(Logs(), loader("classifier"))
    assert t.callback_metrics["loss"] == plain.callback_metrics["loss"]


def test_weights_come_back_after_an_exception() -> None:
    class Fails(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not torch.equal(flat(self), before):
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    net = Fails()
    before = flat(net)
    with pytest.raises(RuntimeError, match="planted"):
        trainer(SampledQuasiNewton(), max_steps=2).fit(net, loader("classifier"))
    assert torch.equal(flat(net), before)


def test_curvature_that_is_not_finite_says_nothing() -> None:
    class Breaks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx) * (float("nan") if len(calls) == 2 else 1.0)

    calls: list[int] = []
    technique = SampledQuasiNewton(num_directions=3)
    net = still(Breaks())
    trainer(technique, max_steps=2).fit(net, loader("classifier"))
    assert technique.report()["rewritten"] == 2 and flat(net).isfinite().all()
    assert not torch.cat([y[0] for y in technique._y.values()]).any()


def test_another_network_and_a_step_that_was_not_finite_draw_anew() -> None:
    class Grows(Nop):
        def on_batch_end(self, session: Session, batch_idx: int) -> None:
            if session.trainer.global_step == 4:
                session.blocks_changed(self)

    technique = SampledQuasiNewton(num_directions=1, interval=100)
    fit("tiny_gpt", lambda: [technique, Grows()], max_steps=6)
    assert technique.report()["passes"] == 4


@pytest.mark.parametrize("method", ["lbfgs", "lsr1"])
def test_resumes_within_accumulation_windows(tmp_path: Path, method: Any) -> None:
    """Also within those of drawing steps, of which a part of the differences is summed."""
    build = lambda: [SampledQuasiNewton(method=method, num_directions=2, interval=2)]  # noqa: E731
    assert resume_from_batches("classifier", build, tmp_path, None if method == "lbfgs" else (1, 8)) == {}


def drawn() -> tuple[SampledQuasiNewton, dict[str, Any]]:
    """One that is within a window of a drawing step, and what two ranks would save of it."""
    technique = SampledQuasiNewton(num_directions=2, interval=2)
    trainer(technique, max_steps=1).fit(module("classifier"), loader("classifier"))
    technique._begun = True
    technique._past = SimpleNamespace(gather=lambda own: [own, {name: 2 * y for name, y in own.items()}])  # type: ignore[assignment]
    return technique, technique.state_dict()


def test_each_rank_takes_up_its_own_sums_and_no_others() -> None:
    technique, state = drawn()
    for rank, world_size, m in ((0, 2, 2), (1, 2, 2), (0, 3, 2), (0, 2, 5)):
        again = SampledQuasiNewton(num_directions=m, interval=2)
        again._session = SimpleNamespace(rank=rank, replicas=SimpleNamespace(count=world_size))  # type: ignore[assignment]
        again.load_state_dict(state)
        fits = world_size == 2 and m == 2
        assert (again._begun, again._drawn_at) == ((True, 0) if fits else (False, -1)), "else they are drawn anew"
        for name, y in again._y.items():
            assert torch.equal(y, (1 + rank) * technique._y[name])
        assert len(again._y) == len(technique._y) * fits
        assert (again._passes, again._pairs) == (technique._passes, technique._pairs) and again._passes == 3


# -- memory, YAML, bad input


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gradients, "free_bytes", lambda device: 10_000)
    message = r"SampledQuasiNewton\(num_directions=8\): 16 vectors of 259 .*at most 9 vectors"
    with pytest.raises(ValueError, match=message):
        trainer(SampledQuasiNewton(num_directions=8), max_steps=1).fit(module("classifier"), loader("classifier"))
    trainer(SampledQuasiNewton(num_directions=4), max_steps=1).fit(module("classifier"), loader("classifier"))


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "SampledQuasiNewton", {"method": "lbfgs", "num_directions": 2, "interval": 2}, max_steps=3)
    assert "S-LBFGS: 3 steps along quasi-Newton directions, 0 as they were, 6 extra passes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "bfgs"}, r"\(method='bfgs'\): expected 'lbfgs' or 'lsr1'"),
        ({"num_directions": -1}, r"\(num_directions=-1\): expected an integer >= 0"),
        ({"interval": 0}, r"\(interval=0\): expected an integer >= 1: "),
        ({"interval": True}, r"\(interval=True\): expected an integer >= 1: "),
        ({"radius": 0.0}, r"\(radius=0.0\): expected a finite number > 0"),
        ({"epsilon": float("inf")}, r"\(epsilon=inf\): expected a finite number > 0"),
        ({"norm": "newton"}, r"\(norm='newton'\): expected 'gradient' or 'inverse'"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SampledQuasiNewton{message}"):
        SampledQuasiNewton(**kwargs)
