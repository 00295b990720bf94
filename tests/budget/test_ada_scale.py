"""AdaScale: the paper's loop by hand, its averages and bounds, its schedule, its end and what it refuses."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import AdaScale, CompressedDDPStrategy, LearningRateSchedule, LinearScaling, LookSAM
from lightning_eff.budget.ada_scale import averaged, gain, variance_and_square
from tests.budget.budget_jobs import Bent, Windows, ada_scale_by_hand, pairs, two_processes
from tests.cases import Case
from tests.conftest import Once
from tests.models import TinyClassifier, flat, loader, trainer
from tests.runs import differences, final_state, fit, fit_yaml

CASES = {
    "AdaScale": Case(
        active=lambda: AdaScale(),
        neutral=lambda: AdaScale(power=0),
        anywhere=True,
    )
}


def windows(S: int, b: int, steps: int) -> Windows:
    x, y = pairs(S * b * steps)
    return [list(zip(*(t[i * S * b : (i + 1) * S * b].split(b) for t in (x, y)), strict=True)) for i in range(steps)]


def run(technique: AdaScale, S: int = 3, b: int = 4, steps: int = 8, net: Any = None, **kwargs: Any) -> Any:
    net = net or Bent()
    data = DataLoader(TensorDataset(*pairs(S * b * steps)), b)
    settings = {"max_steps": steps, "accumulate_grad_batches": S, "precision": "64-true", **kwargs}
    t = trainer(*settings.pop("others", ()), technique, **settings)
    t.fit(net, data, ckpt_path=settings.pop("resume", None))
    return net


# -- the rule


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_it_is_the_papers_loop_by_hand(power: float) -> None:
    """Gains, steps of the small batch, and weights: momentum, and a scheduler that counts the latter."""
    technique = AdaScale(power=power)
    net = run(technique)
    weights, tau, gains = ada_scale_by_hand(windows(3, 4, 8), power)
    assert gains[0] == 1 and all(1 < r < 3 for r in gains[1:]) and max(gains[1:]) - min(gains[1:]) > 0.01
    told = technique.report()
    assert told["gain"] == pytest.approx(gains[-1], rel=1e-9)
    assert told["scaled_steps"] == pytest.approx(tau, rel=1e-9) and tau > 10
    torch.testing.assert_close(flat(net), weights, rtol=1e-9, atol=1e-12)
    assert net.lr_schedulers().last_epoch == math.floor(tau)
    assert f"worth {tau:,.0f} steps of the small batch" in technique.summary()


def test_clipping_comes_after_it() -> None:
    clipped, free = AdaScale(), AdaScale()
    run(clipped, steps=2, gradient_clip_val=1e-6)
    run(free, steps=2)
    assert clipped.report()["gain"] == free.report()["gain"] > 1


@pytest.mark.parametrize("window", [1, 2])
def test_two_processes(once: Once, window: int) -> None:
    """Ranks are micro-batches, alone and with accumulated ones: the same loop by hand, and both ranks agree."""
    found = two_processes(once)["scaled"][f"{window}"]
    x, y = pairs(96)
    micro = [  # of each rank, the batches of 4 of every second sample
        list(zip(*(t[rank::2].split(4) for t in (x, y)), strict=True)) for rank in (0, 1)
    ]
    steps = [
        [part for rank in (0, 1) for part in micro[rank][i * window : (i + 1) * window]] for i in range(12 // window)
    ]
    weights, tau, gains = ada_scale_by_hand(steps)
    for rank in found:
        assert rank["gain"] == pytest.approx(gains[-1], rel=1e-9)
        assert rank["scaled_steps"] == pytest.approx(tau, rel=1e-9)
        torch.testing.assert_close(torch.tensor(rank["weights"], dtype=torch.float64), weights, rtol=1e-9, atol=1e-12)


def test_two_processes_resume_within_a_window(once: Once) -> None:
    assert two_processes(once)["scaled"]["differences"] == [[], []]


@pytest.mark.parametrize("S", [2, 400, 1000])
def test_averages_are_means_at_first(S: int) -> None:
    """Means of n values while n < 1 / (1 - theta), then exponential; theta = max(1 - S / 1000, 0)."""
    values = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta, mean, expected = max(1 - S / 1000, 0.0), torch.zeros(2, dtype=torch.float64), torch.zeros(2)
    for n, value in enumerate(values, 1):
        mean = averaged(mean, value, torch.tensor([float(n)], dtype=torch.float64), S)
        expected = values[:n].mean(0) if n < 1 / (1 - theta) or n == 1 else theta * expected + (1 - theta) * value
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-14)


def test_estimates_are_unbiased_and_bounded() -> None:
    g = torch.Generator().manual_seed(0)
    mu, std, S = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 1.0]), 5
    parts = mu + std * torch.randn(200_000, S, 2, generator=g, dtype=torch.float64)
    small, large = parts.square().sum(-1).mean(), parts.mean(1).square().sum(-1).mean()
    sigma2, mu2 = variance_and_square(small, large, S)
    assert float(sigma2) == pytest.approx(5.0, rel=0.01) and float(mu2) == pytest.approx(1.25, rel=0.02)
    sigma2, mu2 = variance_and_square(torch.tensor(1.0), torch.tensor(1.0), S)  # alike
    assert (float(sigma2), float(mu2)) == (pytest.approx(1e-6), 1.0)
    _, mu2 = variance_and_square(torch.tensor(1.0), torch.tensor(0.1), S)  # less than noise alone would leave
    assert float(mu2) == 0.0
    assert gain(1.0, 0.0, S) == S and gain(0.0, 1.0, S) == 1.0 and gain(1.0, 1.0, S) == pytest.approx(2 / 1.2)


def test_alike_micro_batches_are_worth_one_step() -> None:
    """T: S copies of one batch gain nothing, so the run is that of the small batch."""
    x, y = pairs(4 * 6)
    ends = []
    for copies, callbacks in ((1, []), (3, [AdaScale()])):
        data = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4) for _ in range(copies)]
        net = Bent()
        settings: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": copies, "precision": "64-true"}
        trainer(*callbacks, **settings).fit(net, DataLoader(data, batch_size=None))  # pyright: ignore[reportArgumentType]
        ends.append(flat(net))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)


# -- the schedule and the end


def test_the_run_ends_at_its_steps_of_the_small_batch() -> None:
    technique = AdaScale(steps=10)
    net = run(technique, steps=30, max_steps=-1, max_epochs=1)
    _, tau, gains = ada_scale_by_hand(windows(3, 4, 30)[: net.trainer.global_step])
    assert net.trainer.global_step < 10 <= tau and tau - gains[-1] < 10
    assert technique.report()["scaled_steps"] == pytest.approx(tau)
    assert net.lr_schedulers().last_epoch == 10, "no scheduler steps past its end"
    assert "of 10 steps of the small batch" in technique.summary()


def test_learning_rate_schedule_follows_it() -> None:
    """``u`` is floor(tau) over the steps: each step has the learning rate of the whole steps of the small batch before it."""
    rates = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    others = [LearningRateSchedule("linear"), Look()]
    run(AdaScale(steps=10), steps=30, max_steps=-1, max_epochs=-1, others=others)
    taus = [0.0]
    for r in ada_scale_by_hand(windows(3, 4, 30)[: len(rates)], rate=lambda tau: 0.05 * (1 - math.floor(tau) / 10))[2]:
        taus.append(taus[-1] + r)
    assert rates == pytest.approx([0.05 * (1 - math.floor(tau) / 10) for tau in taus[:-1]], rel=1e-6)


def test_other_schedulers_go_on_as_before() -> None:
    class Epochs(Bent):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    net = run(AdaScale(), net=Epochs(), steps=4, max_steps=8)
    assert net.lr_schedulers().last_epoch == 2


def test_the_order_of_callbacks_does_not_matter() -> None:
    """LookSAM changes the gradient when the backward pass has ended; what is measured is the gradient before that."""
    told = []
    for first in (True, False):
        technique, other = AdaScale(), LookSAM(0.1, interval=2)
        fit("classifier", lambda both=(technique, other), first=first: both if first else both[::-1], max_steps=5)
        told.append(str(technique.report()))
    assert told[0] == told[1]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_batch_leaves_its_window_out() -> None:
    net, technique = Bent(), AdaScale()
    taught = net.training_step
    net.training_step = lambda batch, batch_idx: None if batch_idx == 4 else taught(batch, batch_idx)  # type: ignore[method-assign]
    run(technique, net=net, steps=2)
    whole = AdaScale()
    run(whole, steps=2, max_steps=1)
    assert technique.report()["variance"] == whole.report()["variance"] > 0


def test_it_goes_on_within_a_window(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 10:  # the second of three micro-batches
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    ends = []
    for settings in ({"others": [Save()]}, {"resume": tmp_path / "half.ckpt"}):
        technique, net = AdaScale(), Bent()
        data = DataLoader(TensorDataset(*pairs(96)), 4)
        t = trainer(*settings.get("others", ()), technique, max_steps=8, accumulate_grad_batches=3)
        t.fit(net, data, ckpt_path=settings.get("resume"))
        ends.append((final_state(net, t), str(technique.report()), net.lr_schedulers().last_epoch))
    assert differences(ends[0][0], ends[1][0]) == [] and ends[0][1:] == ends[1][1:]


def test_an_unchanged_module_trains_otherwise_with_it() -> None:
    one, t = fit("classifier", lambda: [AdaScale()])
    other, _ = fit("classifier", list, accumulate_grad_batches=2)
    assert t.accumulate_grad_batches == 2 and not torch.equal(flat(one), flat(other))


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "AdaScale", {"steps": 100}, max_steps=4, accumulate_grad_batches=2)
    assert "of 100 steps of the small batch" in capsys.readouterr().out


# -- refusals


def _fit(*callbacks: pl.Callback, net: Any = None, **kwargs: Any) -> None:
    settings = {"max_steps": 2, "accumulate_grad_batches": 2, **kwargs}
    trainer(*callbacks, **settings).fit(net or TinyClassifier(), loader("classifier"))


def test_a_single_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a step has one micro-batch.*Trainer\(accumulate_grad_batches=...\) to 2"):
        _fit(AdaScale(), accumulate_grad_batches=1)


def test_windows_that_change_are_refused() -> None:
    with pytest.raises(ValueError, match="AdaScale and GradientAccumulationScheduler cannot train together"):
        _fit(GradientAccumulationScheduler({0: 2}), AdaScale(), accumulate_grad_batches=1)
    with pytest.raises(ValueError, match="both scale the learning rate with the batch"):
        _fit(LinearScaling(4, 0.0), AdaScale())


def test_compressed_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AdaScale: .*it compares gradients with their exact mean over processes"):
        _fit(AdaScale(), strategy=CompressedDDPStrategy(), devices=1)


class Counts(Bent):
    """With a scheduler that steps every third batch, or by its own hook."""

    every: int = 1

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"]["frequency"] = self.every
        return found


class Own(Counts):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.global_step)


@pytest.mark.parametrize(
    ("kind", "every", "message"),
    [
        (Counts, 3, "the scheduler LambdaLR steps every 3 batches.*Remove 'frequency'"),
        (Own, 1, "Own.lr_scheduler_step decides how LambdaLR steps.*Remove lr_scheduler_step from Own"),
    ],
)
def test_schedulers_that_cannot_follow_are_refused(kind: type[Counts], every: int, message: str) -> None:
    net = kind()
    net.every = every
    with pytest.raises(ValueError, match=f"AdaScale: .*{message}"):
        run(AdaScale(), net=net)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": 1.5}, {"power": -1.0}, {"power": float("nan")}])
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"AdaScale\({next(iter(arguments))}=.*expected"):
        AdaScale(**arguments)
