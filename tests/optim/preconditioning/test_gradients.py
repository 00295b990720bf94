"""Where gradients are rewritten: once for each step, whole and unscaled, after all others' hooks and before clipping."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_eff import GradientCentralization
from lightning_eff._core._run import free_memory
from lightning_eff._core.session import Session
from lightning_eff.optim.preconditioning import _gradients
from lightning_eff.optim.preconditioning._gradients import Gradients, Preconditioner, stepped
from tests.models import TinyClassifier, flat, hugging_face, loader, module, trainer


class Tenfold(Preconditioner):
    """Ten times the gradient; notes what it was given."""

    def __init__(self) -> None:
        self._reset()
        self.seen: list[Gradients] = []

    def precondition(self, session: Session, gradients: Gradients) -> Gradients | None:
        self.seen.append({name: g.clone() for name, g in gradients.items()})
        return {name: 10 * g for name, g in gradients.items()}


def still(net: Any, momentum: float = 0.0) -> Any:
    """Without dropout, under plain SGD."""
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.05, momentum=momentum)
    return net


def built(name: str = "classifier") -> Any:
    pl.seed_everything(1, verbose=False)
    return still(module(name))


class Looks(pl.Callback):
    """Notes the gradients that a hook of a callback sees."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([p.grad.clone() for p in pl_module.parameters()])


@pytest.mark.parametrize("first", [True, False])
def test_it_comes_after_the_windows_sum_and_all_hooks_and_before_clipping(first: bool) -> None:
    """Bit for bit a loop written by hand, whatever the order of the callbacks."""
    data, net, technique, looks = loader("classifier", 48, shuffle=False), built(), Tenfold(), Looks()
    callbacks = [technique, GradientCentralization(), looks]
    t = trainer(*callbacks[:: 1 if first else -1], max_steps=6, accumulate_grad_batches=2, gradient_clip_val=0.05)
    t.fit(net, data)
    by_hand, clipped, raw = built(), [], []
    optimizer = by_hand.configure_optimizers()
    for index, batch in enumerate(data):
        (by_hand.training_step(batch, index) / 2).backward()
        if index % 2:
            for p in by_hand.parameters():
                if p.ndim > 1:
                    p.grad.add_(-p.grad.mean(dim=1, keepdim=True))
            raw.append([p.grad.clone() for p in by_hand.parameters()])
            for p in by_hand.parameters():
                p.grad.mul_(10)
            clipped.append(float(nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)) > 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(flat(net), flat(by_hand)) and len(clipped) == 6 and all(clipped)
    given = [list(step.values()) for step in technique.seen]
    pairs = list(zip(given, raw, strict=True)) + list(zip(looks.seen, raw, strict=True)) * first
    assert len(given) == 6
    for found, expected in pairs:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_modules_own_clipping_gets_the_direction() -> None:
    class Clips(TinyClassifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None]))

    seen: list[Tensor] = []
    technique = Tenfold()
    pl.seed_everything(1, verbose=False)
    trainer(technique, max_steps=2).fit(still(Clips()), loader("classifier"))
    given = [torch.cat([g.flatten() for g in step.values()]) for step in technique.seen]
    assert len(seen) == 2 and all(torch.equal(a, 10 * b) for a, b in zip(seen, given, strict=True))


@pytest.mark.parametrize("unscales", [False, True], ids=["unscaled by the scaler", "by a fused optimizer"])
def test_a_gradient_scalers_factor_is_out(unscales: bool) -> None:
    def run(scale: float | None) -> tuple[Tensor, Tenfold]:
        net, technique = built(), Tenfold()
        plugins = []
        if scale is not None:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
            plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
            plugins[0].autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
            if unscales:
                net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.05, fused=True)
        trainer(technique, max_steps=3, plugins=plugins).fit(net, loader("classifier", shuffle=False))
        return flat(net), technique

    plain, given = run(None)
    scaled, same = run(2.0**9)
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-6)
    for a, b in zip(given.seen, same.seen, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_a_step_with_a_gradient_that_is_not_finite_is_that_of_plain_training() -> None:
    class Breaks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)

    pl.seed_everything(1, verbose=False)
    net, technique = still(Breaks()), Tenfold()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(technique, max_steps=4, plugins=[plugin]).fit(net, loader("classifier"))
    assert flat(net).isfinite().all() and scaler.get_scale() == 2.0**6
    assert len(technique.seen) == 3 and technique.report()["rewritten"] == 3 and technique.report()["left"] == 1


def test_a_step_without_a_loss_is_not_looked_at() -> None:
    """Under a scaler its gradients, of the window's other batches, are not unscaled, and nothing is stepped."""

    class Skips(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    pl.seed_everything(1, verbose=False)
    technique = Tenfold()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    t = trainer(technique, max_epochs=1, accumulate_grad_batches=2, plugins=[plugin])
    Closure.warning_cache.clear()  # Lightning warns of this once in a process
    with pytest.warns(UserWarning, match="returned `None`"):
        t.fit(still(Skips()), loader("classifier", 16))
    assert len(technique.seen) == 1 and float(technique.report()["gradient_norm"]) < 10


def test_what_has_no_gradient_or_a_sparse_one_is_left() -> None:
    class Mixed(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8, sparse=True)
            self.layer, self.unused, self.frozen = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)
            self.frozen.requires_grad_(False)
            self.tied = self.layer
            self.outside = [nn.Parameter(torch.zeros(3))]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h = batch[0] + self.table(batch[1])
            return (self.layer(h) + self.tied(h) + self.frozen(h) + self.outside[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": list(self.parameters())}, {"params": self.outside}], 0.05)

    technique = Tenfold()

    class Names(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            names.extend(stepped(technique.session))

    names: list[str] = []
    net = Mixed()
    trainer(technique, Names(), max_steps=2).fit(net, loader("classifier"))
    assert [set(step) for step in technique.seen] == [{"layer.weight", "layer.bias"}] * 2
    assert set(names) == {"table.weight", "layer.weight", "layer.bias", "unused.weight", "unused.bias"}
    assert net.table.weight.grad is None or net.table.weight.grad.is_sparse


def test_complex_parameters_are_given_as_pairs_of_numbers() -> None:
    class Complex(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (batch[0].to(torch.complex64) @ self.w).abs().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    technique, net = Tenfold(), Complex()
    before = net.w.detach().clone()
    trainer(technique, max_steps=1).fit(net, loader("classifier"))
    g = technique.seen[0]["w"]
    assert g.shape == (8, 3, 2)
    torch.testing.assert_close(net.w.detach(), before - 0.1 * torch.view_as_complex(g))


def test_gradients_in_bfloat16_are_given_in_float32() -> None:
    technique = Tenfold()
    trainer(technique, max_steps=1, precision="bf16-true").fit(hugging_face("gpt2"), loader("gpt2"))
    assert {g.dtype for g in technique.seen[0].values()} == {torch.float32}


def test_a_trial_run_of_lightnings_tuners_is_plain() -> None:
    technique, net = Tenfold(), built()
    t = trainer(technique, LearningRateFinder(num_training_steps=5, attr_name="lr"), max_steps=2)
    t.fit(net, loader("classifier", 40))
    assert len(technique.seen) == 2


def test_what_was_done_is_kept() -> None:
    technique, again = Tenfold(), Tenfold()
    trainer(technique, max_steps=2).fit(built(), loader("classifier"))
    state = technique.state_dict()
    again.load_state_dict(state)
    assert again.state_dict() == state and state["rewritten"] == 2 and state["last"]["gradient_norm"] > 0


def test_a_direction_that_is_not_finite_leaves_the_gradient() -> None:
    gradient, direction = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, torch.nan, 1.0])}
    assert Tenfold()._finished(gradient, direction, 1.0, "gradient") is None
    assert Tenfold()._finished(gradient, {"w": torch.full((3,), 2.0)}, 6.0, "gradient") is not None


@pytest.mark.parametrize(("num_devices", "fits"), [(1, True), (2, False)])
def test_processes_of_one_machine_share_its_memory(num_devices: int, fits: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(_gradients, "free_bytes", lambda device: 1500)
    net = nn.Linear(9, 10)  # 400 bytes
    session: Any = SimpleNamespace(
        module=net,
        optimizers=[torch.optim.SGD(net.parameters(), 0.1)],
        trainer=SimpleNamespace(num_devices=num_devices),
        _stacks={},
    )
    if fits:
        assert "2 vectors of 100 parameters take" in _gradients.check_room("A", session, 2)
    else:
        with pytest.raises(ValueError, match=r"A: 2 vectors of 100 parameters are 800 bytes on cpu.*at most 1 vectors"):
            _gradients.check_room("A", session, 2)


def test_lbfgs_is_refused() -> None:
    net = built()
    net.configure_optimizers = lambda: torch.optim.LBFGS(net.parameters())
    with pytest.raises(ValueError, match="Tenfold: the optimizer LBFGS evaluates many gradients per step"):
        trainer(Tenfold(), max_steps=1).fit(net, loader("classifier"))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    net = built()
    net.configure_optimizers = lambda: torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
    with pytest.raises(
        ValueError, match="optimizers of TinyClassifier have no parameter of it that requires a gradient"
    ):
        trainer(Tenfold(), max_steps=1).fit(net, loader("classifier"))


# -- what a device has left


def test_a_cpu_has_left_what_is_available_or_what_its_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    assert 2**20 < (free_memory.free_bytes(cpu) or 0) < 2**50
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    assert free_memory._left_of_limit(tmp_path) is None
    limit.write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300\n")
    assert free_memory._left_of_limit(tmp_path) == 400, "cached files make room"
    assert free_memory._left_of_limit(tmp_path / "none") is None
    monkeypatch.setattr(free_memory, "_left_of_limit", lambda: 400)
    assert free_memory.free_bytes(cpu) == 400


def test_bytes_in_words() -> None:
    found = [free_memory.in_words(n) for n in (12, 2048, 3 * 2**19, 5 * 2**40)]
    assert found == ["12 bytes", "2.00 KiB", "1.50 MiB", "5,120.00 GiB"]
