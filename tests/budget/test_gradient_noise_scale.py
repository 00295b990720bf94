"""GradientNoiseScale: exact on gradients that are known, from micro-batches, ranks and steps; and weights as without it."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import BatchSizeWarmup, GradientNoiseScale, SharpnessAwareMinimization
from lightning_eff.budget.gradient_noise_scale import signal_and_noise
from tests.budget.budget_jobs import Known, known_samples, two_processes
from tests.cases import Case
from tests.conftest import Once
from tests.models import flat, loader, trainer
from tests.runs import fit, fit_yaml

CASES = {
    "GradientNoiseScale": Case(
        active=lambda: GradientNoiseScale(half_life=5),
        neutral=lambda: GradientNoiseScale(every=0),
        exact=True,
        figure="steps",
        anywhere=True,
    )
}


def measured(technique: GradientNoiseScale, *others: pl.Callback, steps: int = 200, b: int = 4, **kwargs: Any) -> Known:
    net = Known()
    window = kwargs.get("accumulate_grad_batches", 1)
    data = DataLoader(TensorDataset(known_samples(steps * window * b)), b)
    trainer(*others, technique, **{"max_steps": steps, **kwargs}).fit(net, data)
    return net


def by_hand(samples: Tensor, b: int, count: int) -> tuple[float, float]:
    """The means over steps of McCandlish's two estimates, for gradients that are means of samples."""
    parts = samples.double().view(-1, count, b, samples.shape[-1]).mean(2)
    small, large = parts.square().sum(-1).mean(1), parts.mean(1).square().sum(-1)
    B = b * count
    return float(((B * large - b * small) / (B - b)).mean()), float(((small - large) / (1 / b - 1 / B)).mean())


def test_the_estimates_are_unbiased() -> None:
    """T: they recover the mean's square norm and the trace of the covariance."""
    x = known_samples(400_000)
    signal, noise = by_hand(x, 4, 5)
    assert signal == pytest.approx(float(Known.mean.square().sum()), rel=0.02)
    assert noise == pytest.approx(float(Known.std.square().sum()), rel=0.02)
    # of exact moments, exactly
    assert signal_and_noise(3.0 + 2.0 / 4, 3.0 + 2.0 / 20, 4, 20) == pytest.approx((3.0, 2.0))


@pytest.mark.parametrize("extra", [{}, {"gradient_clip_val": 0.01}, {"precision": "bf16-mixed"}])
def test_micro_batches_of_known_gradients(extra: dict[str, Any]) -> None:
    """A module whose gradient is the mean of its samples, whatever its weights; clipping comes after."""
    technique = GradientNoiseScale(half_life=1e9)
    measured(technique, accumulate_grad_batches=5, **extra)
    signal, noise = by_hand(known_samples(200 * 5 * 4), 4, 5)
    told = technique.report()
    assert (told["steps"], told["batch"]) == (200, 20)
    assert (told["signal"], told["noise"]) == (pytest.approx(signal, rel=1e-4), pytest.approx(noise, rel=1e-4))
    assert told["critical_batch"] == pytest.approx(noise / signal, rel=1e-4)
    assert "comparing micro-batches" in technique.summary() and "A step of 20 makes" in technique.summary()


def test_consecutive_steps_stand_in_where_there_is_nothing_else() -> None:
    technique = GradientNoiseScale(half_life=1e9)
    measured(technique)
    signal, noise = by_hand(known_samples(200 * 4), 4, 2)
    told = technique.report()
    assert (told["steps"], told["batch"], told["signal"]) == (100, 4, pytest.approx(signal, rel=1e-4))
    assert told["noise"] == pytest.approx(noise, rel=1e-4) and "comparing consecutive steps" in technique.summary()


def test_consecutive_steps_of_other_sizes() -> None:
    """A mean over b has the noise tr / b: two such squares together that of the harmonic mean of both b."""

    def of_sizes(samples: Tensor) -> tuple[float, float]:
        both = samples.double().view(-1, 5, samples.shape[-1])
        four, one = both[:, :4].mean(1), both[:, 4]
        small, large = (four.square() + one.square()).sum(-1).mean() / 2, both.mean(1).square().sum(-1).mean()
        signal, noise = signal_and_noise(float(small), float(large), 2 / (1 / 4 + 1 / 1), 5)
        return signal, noise

    signal, noise = of_sizes(known_samples(400_000))
    assert signal == pytest.approx(float(Known.mean.square().sum()), rel=0.02), "unbiased"
    assert noise == pytest.approx(float(Known.std.square().sum()), rel=0.02), "unbiased"
    technique, samples = GradientNoiseScale(half_life=1e9), known_samples(5 * 50)
    batches: Any = [[part] for part in samples.split([4, 1] * 50)]
    trainer(technique, max_steps=100).fit(Known(), DataLoader(batches, batch_size=None))
    told = technique.report()
    assert (told["steps"], told["signal"], told["noise"]) == (
        50,
        *(pytest.approx(value, rel=1e-3) for value in of_sizes(samples)),
    )


class Halves(pl.LightningModule):
    """Two weights; ``used`` says of a step which have a gradient."""

    def __init__(self, used: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.weights, self.used = nn.ParameterList(torch.zeros(1) for _ in range(2)), used

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return torch.stack([(batch[0] * self.weights[i]).sum() for i in self.used[batch_idx]]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(("used", "steps"), [(((0,), (1,)), 0), (((0, 1), (1,)), 1)])
def test_a_pair_of_steps_without_a_common_gradient_is_none(used: tuple[tuple[int, ...], ...], steps: int) -> None:
    """And one that a single step lacks counts as zero there: (|(1, 1)|^2 + |(0, 3)|^2) / 2 and |(1, 4)|^2 / 4."""
    technique = GradientNoiseScale()
    data = DataLoader(TensorDataset(torch.tensor([[1.0], [3.0]])), 1)
    trainer(technique, max_steps=2).fit(Halves(used), data)
    told = technique.report()
    assert told["steps"] == steps
    if steps:
        signal, noise = signal_and_noise((2 + 9) / 2, 17 / 4, 1, 2)
        assert (told["signal"], told["noise"]) == (pytest.approx(signal), pytest.approx(noise))


def test_it_is_a_ratio_of_means_of_a_half_life() -> None:
    technique = GradientNoiseScale(half_life=2.0)
    measured(technique, steps=7, accumulate_grad_batches=5)
    parts = known_samples(7 * 20).split(20)
    pairs = [by_hand(part, 4, 5) for part in parts]
    weights = [2 ** (-(6 - i) / 2) for i in range(7)]
    signal, noise = (sum(w * p[k] for w, p in zip(weights, pairs, strict=True)) / sum(weights) for k in (0, 1))
    assert technique.report()["signal"] == pytest.approx(signal, rel=1e-4)
    assert technique.critical_batch == pytest.approx(noise / signal, rel=1e-4)


def test_while_noise_hides_the_gradient_no_batch_is_told() -> None:
    technique = GradientNoiseScale()
    technique._take(3.0, 1.0, 4, 8, trainer())  # |G|^2 = (8 - 12) / 4 < 0
    assert technique.critical_batch is None and math.isnan(float(technique.report()["critical_batch"]))
    assert "the critical batch size is unknown" in technique.summary()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_other_windows_are_left_out_and_others_passes_too() -> None:
    """Short windows, batches of another size or that are passed over, and the passes of other techniques."""
    technique = GradientNoiseScale()
    net = Known()
    data = DataLoader(
        TensorDataset(known_samples(4 * 7 + 2)), 4
    )  # windows of 3, 3, and one with a batch of 2 and no third
    trainer(technique, max_epochs=2, max_steps=-1, accumulate_grad_batches=3).fit(net, data)
    assert technique.report()["steps"] == 4
    alone, beside = GradientNoiseScale(half_life=1e9), GradientNoiseScale(half_life=1e9)
    measured(alone, steps=10, accumulate_grad_batches=2)
    measured(beside, SharpnessAwareMinimization(rho=0.01), steps=10, accumulate_grad_batches=2)
    assert beside.report()["noise"] == pytest.approx(alone.report()["noise"], rel=1e-4)
    net = Known()
    skipping, taught = GradientNoiseScale(half_life=1e9), net.training_step
    net.training_step = lambda batch, batch_idx: None if batch_idx in (3, 4) else taught(batch, batch_idx)
    data = DataLoader(TensorDataset(known_samples(4 * 12)), 4)
    trainer(skipping, max_epochs=1, max_steps=-1, accumulate_grad_batches=2).fit(net, data)
    whole = [by_hand(part, 4, 2)[1] for part in known_samples(4 * 12).split(8)]
    assert skipping.report()["steps"] == 4, "two windows have a batch that was passed over"
    assert skipping.report()["noise"] == pytest.approx((whole[0] + sum(whole[3:])) / 4, rel=1e-4)
    thinned = GradientNoiseScale(every=5)
    measured(thinned, steps=10, accumulate_grad_batches=2)
    assert thinned.report()["steps"] == 2


@pytest.mark.parametrize("by", ["accumulation", "batch"])
def test_beside_a_batch_that_grows(by: Any) -> None:
    technique = GradientNoiseScale(half_life=1e9)
    measured(technique, BatchSizeWarmup(1, 0.5, full=2, by=by), steps=8, accumulate_grad_batches=2)
    assert technique.report()["steps"] == 8
    x = known_samples(64)  # four steps of 8 samples, then four of 16, which go on in the next epoch
    first, then = by_hand(x[:32], 4, 2), by_hand(x.roll(-32, 0), *((4, 4) if by == "accumulation" else (8, 2)))
    assert technique.report()["noise"] == pytest.approx((first[1] + then[1]) / 2, rel=1e-3)


def test_weights_and_traces_are_as_without_it() -> None:
    ends = []
    for techniques in ([], [GradientNoiseScale()]):
        net, _ = fit("classifier", lambda techniques=techniques: techniques, accumulate_grad_batches=2)
        ends.append(flat(net))
        assert all(not p._backward_hooks for p in net.parameters())
    assert torch.equal(*ends)


def test_it_goes_on_with_its_means(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 6:  # the second of three micro-batches
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run(*callbacks: pl.Callback, **kwargs: Any) -> str:
        technique = GradientNoiseScale()
        data = DataLoader(TensorDataset(known_samples(60)), 4)
        trainer(technique, *callbacks, max_steps=5, accumulate_grad_batches=3).fit(Known(), data, **kwargs)
        return str(technique.report())

    assert run(Save()) == run(ckpt_path=tmp_path / "half.ckpt")


def test_two_processes(once: Once) -> None:
    """Ranks are small batches, alone and with micro-batches; all tell the same."""
    found = two_processes(once)["noise"]
    x = known_samples(320).view(-1, 2, 4)  # of two ranks in turn
    for window in (1, 4):
        own = (
            x.view(40, 4, 2, 4).transpose(1, 2).reshape(40 // window, window, 2, 4, 4)
        )  # steps, micro-batches, ranks, b, d
        signal, noise = by_hand(own.reshape(-1, 4), 4, 2 * window)
        for told in found[f"{window}"]:
            assert (told["steps"], told["batch"]) == (40 // window, 8 * window)
            assert (told["signal"], told["noise"]) == (pytest.approx(signal, rel=1e-4), pytest.approx(noise, rel=1e-4))


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "GradientNoiseScale", {"half_life": 10}, max_steps=4, accumulate_grad_batches=2)
    assert "comparing micro-batches" in capsys.readouterr().out


def test_bad_arguments_are_refused() -> None:
    for arguments in ({"half_life": 0.0}, {"half_life": float("nan")}, {"every": -1}, {"every": 1.5}):
        with pytest.raises(ValueError, match=rf"GradientNoiseScale\({next(iter(arguments))}=.*expected"):
            GradientNoiseScale(**arguments)  # pyright: ignore[reportArgumentType]


def test_sparse_gradients_count() -> None:
    class Sparse(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.table(batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    technique = GradientNoiseScale()
    trainer(technique, max_steps=2, accumulate_grad_batches=2).fit(Sparse(), loader("classifier"))
    assert technique.report()["steps"] == 2
