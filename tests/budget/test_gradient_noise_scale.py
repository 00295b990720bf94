"""GradientNoiseScale: exact on gradients that are known, from micro-batches, ranks and steps; and weights as without it."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import BatchSizeWarmup, GradientNoiseScale, SharpnessAwareMinimization
from lightning_eff.budget import gradient_noise_scale
from lightning_eff.budget.gradient_noise_scale import _Copies, signal_and_noise
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


def of_unequal(samples: Tensor, sizes: list[int]) -> list[tuple[float, float]]:
    """The two estimates of each step whose micro-batches have ``sizes``, from moments of a mean of means.

    The mean of ``|g_i|^2`` has the expectation ``|G|^2 + S a`` with ``a = mean(1 / b_i)``, and ``|mean(g_i)|^2`` has
    ``|G|^2 + S a / n``. Both are solved for ``|G|^2`` and ``S``.
    """
    steps = samples.double().view(-1, sum(sizes), samples.shape[-1])
    parts = torch.stack([part.mean(1) for part in steps.split(sizes, 1)], 1)
    small, large = parts.square().sum(-1).mean(1), parts.mean(1).square().sum(-1)
    n, a = len(sizes), sum(1 / b for b in sizes) / len(sizes)
    equations = torch.tensor([[1.0, a], [1.0, a / n]], dtype=torch.float64)
    found = torch.linalg.solve(equations, torch.stack([small, large]))
    return list(zip(*found.tolist(), strict=True))


def mean_of(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    signal, noise = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return signal, noise


def test_micro_batches_of_unequal_sizes() -> None:
    signal, noise = mean_of(of_unequal(known_samples(300_000), [1, 2, 3, 6]))
    assert signal == pytest.approx(float(Known.mean.square().sum()), rel=0.02), "unbiased"
    assert noise == pytest.approx(float(Known.std.square().sum()), rel=0.02), "unbiased"
    technique, samples = GradientNoiseScale(half_life=1e9), known_samples(12 * 40)
    batches: Any = [[part] for part in samples.split([1, 2, 3, 6] * 40)]
    trainer(technique, max_steps=40, accumulate_grad_batches=4).fit(Known(), DataLoader(batches, batch_size=None))
    told = technique.report()
    signal, noise = mean_of(of_unequal(samples, [1, 2, 3, 6]))
    assert (told["steps"], told["batch"]) == (40, 12)
    assert (told["signal"], told["noise"]) == (pytest.approx(signal, rel=1e-4), pytest.approx(noise, rel=1e-4))


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
    technique._take(torch.tensor(3.0), torch.tensor(1.0), 4, 8, 8, trainer())  # |G|^2 = (8 - 12) / 4 < 0
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


class Waits(TorchDispatchMode):
    """Counts operations whose result a program on the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [1, 2])
def test_no_step_waits_for_the_device(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is reported, saved or read does."""
    counts = []
    for techniques in ([], [GradientNoiseScale()]):
        with Waits() as waits:
            fit("classifier", lambda techniques=techniques: techniques, accumulate_grad_batches=window)
        counts.append(waits.count)
    assert counts[0] == counts[1]
    technique = GradientNoiseScale()
    calls = dict.fromkeys(("_numbers", "report"), 0)
    for name in calls:
        own = getattr(technique, name)

        def counted(name: str = name, own: Any = own) -> Any:
            calls[name] += 1
            return own()

        monkeypatch.setattr(technique, name, counted)
    seen: list[dict[str, int]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(dict(calls))

    measured(technique, Look(), steps=6, accumulate_grad_batches=window)
    assert len(seen) == 6 * window and seen[1] == seen[-1], "reported once, after the first step"
    assert all(found["_numbers"] == found["report"] for found in seen)


def test_it_makes_no_difference_when_the_waiting_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for most in (1, 7, 1000):
        monkeypatch.setattr(gradient_noise_scale, "_MOST", most)
        technique = GradientNoiseScale()
        measured(technique, steps=40, accumulate_grad_batches=2, log_every_n_steps=11)
        told.append(technique.report())
    assert told[0] == told[1] == told[2] and told[0]["steps"] == 40


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
    x = known_samples(80)
    # rank 0 has 1 and 3 samples in each window, and rank 1 has 4 and 2
    signal, noise = mean_of(of_unequal(x, [1, 3, 4, 2]))
    for told in found["unequal"]:
        assert (told["steps"], told["batch"]) == (8, 10)
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


@pytest.mark.parametrize("kind", ["one", "dtypes", "sparse", "complex"])
def test_copies_are_exact_and_use_their_memory_again(kind: str) -> None:
    def made(seed: int) -> list[Tensor | None]:
        g = torch.Generator().manual_seed(seed)
        found = [torch.randn(3, 5, generator=g), None, torch.randn(7, generator=g)]
        other = torch.randn(4, 2, generator=g)
        others = {"one": other.t(), "dtypes": other.bfloat16(), "complex": other + 1j, "sparse": other.to_sparse()}
        return [*found, others[kind]]

    copies = _Copies()
    first, gradients = copies.take(made(0)), made(1)
    held = [None if t is None or t.is_sparse else t.data_ptr() for t in first]
    second = copies.take(gradients)
    for copy, gradient in zip(second, gradients, strict=True):
        assert (copy is None) == (gradient is None)
        if copy is not None and gradient is not None:
            assert torch.equal(copy.to_dense(), gradient.to_dense()) and copy.dtype == gradient.dtype
    again = [None if t is None or t.is_sparse else t.data_ptr() for t in second]
    assert (copies.whole is not None) == (again == held) == (kind == "one")
    if copies.whole is not None:
        assert all(place % 64 == 0 for place in held if place is not None), "as a tensor of its own is"
        exact = sum(float(t.double().square().sum()) for t in gradients if t is not None)
        assert float(copies.whole.double().square().sum()) == pytest.approx(exact, rel=1e-12)
    gradients[2] = None  # one that is not trained any more
    fewer = copies.take(gradients)
    assert [t is None for t in fewer] == [False, True, True, False]
    if copies.whole is not None:  # in the same memory, without what was there
        assert [t.data_ptr() for t in (fewer[0], copies.take(made(2))[0]) if t is not None] == [held[0], held[0]]
        copies.take(gradients)
        exact = sum(float(t.double().square().sum()) for t in gradients if t is not None)
        assert float(copies.whole.double().square().sum()) == pytest.approx(exact, rel=1e-12)


def test_a_pair_that_a_checkpoint_divides_is_measured_alike(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> str:
        technique = GradientNoiseScale()
        fit("classifier", lambda: [technique], max_steps=6, directory=tmp_path, steps=[3], **kwargs)
        return str(technique.report())

    whole = run()
    (saved,) = tmp_path.rglob("*3.ckpt")
    assert "'steps': 3" in whole and whole == run(resume=saved)
