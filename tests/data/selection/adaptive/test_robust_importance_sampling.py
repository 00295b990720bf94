"""RobustImportanceSampling: unbiased, no sample without a chance, minimax against its set, steps as long as they earn."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import RobustImportanceSampling
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff.data.selection._weighing import draw
from lightning_eff.data.selection.adaptive._uncertainty import Moments, features, fit, mixed_with_uniform, worst_norms
from lightning_eff.data.selection.adaptive.robust_importance_sampling import unbiased_weights
from tests.cases import Case, own_loss
from tests.data.selection.numbered import N, Numbered, run
from tests.data.selection.test_importance_sampling import logits_and_labels, mean_loss, ragged
from tests.data.selection.test_importance_sampling import still as still_module
from tests.models import TinyClassifier, trainer
from tests.runs import fit_yaml

CASES = {
    "RobustImportanceSampling": Case(
        active=lambda: RobustImportanceSampling(refits=2),
        neutral=lambda: RobustImportanceSampling(uniform=1.0),
        lost=(own_loss, "classifier", "loss"),
    )
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the rule


def test_the_mean_of_1500_draws_is_the_mean_over_all() -> None:
    """Each ``E[w_i f_i]`` in a sum that is made out of all draws' probabilities, and 1,500 draws within their error."""
    v, f = numbers(40).square(), numbers(40, 6, seed=1) - 0.3
    p = mixed_with_uniform(v, 0.1)
    w = unbiased_weights(p)
    torch.testing.assert_close((p[:, None] * w[:, None] * f).sum(0), f.mean(0), rtol=1e-12, atol=1e-12)
    index = draw(p, 1500, torch.Generator().manual_seed(0))
    drawn = w[index, None] * f[index]
    error = drawn.mean(0) - f.mean(0)
    assert (error.abs() < 4.5 * drawn.std(0) / math.sqrt(1500)).all()
    assert not (f[index].mean(0) - f.mean(0)).abs().max() < 2 * error.abs().max(), "unweighted ones are biased"


def test_all_have_a_chance_and_no_weight_is_above_its_bound() -> None:
    v = torch.tensor([0.0, 0.0, 5.0, 1e-9])
    p = mixed_with_uniform(v, 0.2)
    assert float(p.min()) == pytest.approx(0.05) and float(p.sum()) == pytest.approx(1)
    assert float(unbiased_weights(p).max()) == pytest.approx(5)
    assert mixed_with_uniform(torch.zeros(4), 0.2).tolist() == [0.25] * 4


def test_probabilities_are_minimax_against_the_set() -> None:
    """No other ``p`` has a lower second moment in its own worst case; the worst norms lie on the ellipsoid's edge."""
    s, c, d = numbers(5, 3) + 0.05, torch.tensor([0.4, 0.7, 0.1]).double(), torch.tensor([0.02, 0.05, 0.01]).double()
    v = worst_norms(s, c, d)
    middle, extent = s @ c, s @ d
    assert float(((v - middle) ** 2 / extent).mean()) == pytest.approx(1, rel=1e-12)

    def worst(p: Tensor) -> float:
        """``max_v sum_i v_i^2 / p_i`` over the set, by projected ascent from many starts on its edge."""
        z = torch.randn(4000, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        for _ in range(60):
            z = z / (z.square().mean(dim=1, keepdim=True)).sqrt()
            z = z + 0.5 * (middle + z * extent.sqrt()) * extent.sqrt() / p / 5
        z = z / (z.square().mean(dim=1, keepdim=True)).sqrt()
        return float((((middle + z * extent.sqrt()).square() / p).sum(dim=1)).max())

    p = v / v.sum()
    assert worst(p) == pytest.approx(float(v.sum() ** 2), rel=1e-3)
    g = torch.Generator().manual_seed(0)
    for scale in (0.02, 0.1, 0.3):
        for _ in range(5):
            other = p * (1 + scale * torch.randn(5, generator=g, dtype=torch.float64)).clamp(min=0.2)
            assert worst(other / other.sum()) > float(v.sum() ** 2) * (1 - 1e-3)


def test_the_learnt_set_is_the_smallest_that_holds_what_was_seen() -> None:
    """The optimality conditions of the problem that is solved, by autograd."""
    s = torch.stack([torch.ones(400), numbers(400) * 2, numbers(400, seed=1)], dim=1).double()
    v = (0.3 + 0.8 * s[:, 1] + 0.3 * (numbers(400, seed=2) - 0.5) * (0.2 + s[:, 2])).clamp(min=0)
    w = numbers(400, seed=3) + 0.5
    w = w / w.mean()
    every = s.sum(0)
    c, d = fit(s, v, w, every, rounds=2_000)
    c.requires_grad_()
    d.requires_grad_()
    constraint = (w * (s @ c - v).square() / (s @ d)).mean()
    assert constraint.item() == pytest.approx(1, rel=1e-9)
    size = every @ d
    # stationary: grad size + mu grad constraint = 0 where a coordinate is above 0, and >= 0 where it is 0; mu = size
    slopes = torch.autograd.grad(size + size.item() * constraint, (c, d))
    for x, slope in zip((c, d), slopes, strict=True):
        assert (slope > -1e-3 * size.item()).all()
        assert ((slope * x).abs() < 1e-3 * size.item()).all()
    assert abs(c[0].item() - 0.3) < 0.1 and abs(c[1].item() - 0.8) < 0.1, "the truth lies in the middle"
    quick = fit(s, v, w, every)
    assert float(every @ quick[1]) < 1.02 * size.item(), "what a run takes time for is as good"


def test_without_information_all_are_alike() -> None:
    unseen = torch.full((6,), torch.nan)
    assert not features(unseen, unseen).any()
    alike = features(torch.full((6,), 2.0), torch.ones(6))
    c, d = fit(alike, torch.full((6,), 2.0).double(), torch.ones(6), alike.sum(0))
    assert mixed_with_uniform(worst_norms(alike, c, d), 0.1).tolist() == pytest.approx([1 / 6] * 6)
    some = features(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([0.5, torch.nan, 2.0]))
    assert some.tolist() == [[2, 1, 1], [2, 2, 4], [2, 3, 4]]
    assert Moments(uniform=0.7, drawn=0.7, signal=0.3).gain(32) == 1.0
    assert Moments().gain(4) == 1.0


def test_the_gain_is_the_ratio_of_second_moments() -> None:
    """Of means of 5 draws, counted out of 20,000 of each kind."""
    f = numbers(12, 4) - 0.4
    f[3] *= 9
    p = mixed_with_uniform(f.norm(dim=1), 0.1)
    w = unbiased_weights(p)
    exact = Moments(
        float(f.square().sum(1).mean()),
        float((p * w.square() * f.square().sum(1)).sum()),
        float(f.mean(0).square().sum()),
    ).gain(5)
    g = torch.Generator().manual_seed(0)
    even = f[torch.randint(12, (100_000,), generator=g)].reshape(-1, 5, 4).mean(1).square().sum(1).mean()
    index = draw(p, 100_000, g)
    ours = (w[index, None] * f[index]).reshape(-1, 5, 4).mean(1).square().sum(1).mean()
    assert exact == pytest.approx(float(even / ours), rel=0.03) and exact > 1.2


# -- in a run


class Linear(pl.LightningModule):
    """A linear classifier on inputs of norm 1, whose gradient's norm is the norm at the logits."""

    def __init__(self, lr: float = 0.0, schedule: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.lr, self.schedule = nn.Linear(4, 3), lr, schedule
        self._seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, i = batch
        if torch.is_grad_enabled():
            self._seen.append(i.tolist())
        return F.cross_entropy(self.fc(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 80)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def uneven(size: int = 24) -> TensorDataset:
    """Most samples are right by the weights of the start, a few are wrong."""
    net = Linear()
    x = F.normalize(numbers(size, 4).float() - 0.5, dim=1)
    y = net.fc(8 * x).argmax(1)
    y[:3] = (y[:3] + 1) % 3
    return TensorDataset(x, y, torch.arange(size))


def still(net: Linear) -> Linear:
    net.fc.weight.data.mul_(8)
    return net


def test_norms_and_probabilities_are_those_of_the_gradients() -> None:
    """At weights that stay: after two epochs the set is a point, and ``p`` is what an oracle draws with."""
    data, net = uneven(), still(Linear())
    technique = RobustImportanceSampling(uniform=0.1, refits=1)
    trainer(technique, max_epochs=5, max_steps=-1).fit(net, DataLoader(data, 4, shuffle=True))
    x, y, _ = data.tensors
    z = net.fc(x).softmax(1)
    z = z - F.one_hot(y, 3)
    norms = z.norm(dim=1).detach()
    state = technique.state_dict()
    torch.testing.assert_close(state["norms"], norms)
    p = 0.9 * norms / norms.sum() + 0.1 / 24
    assert technique.report()["most"] == pytest.approx(24 * float(p.max()), rel=0.03)
    assert technique.report()["least"] == pytest.approx(24 * float(p.min()), rel=0.03)
    drawn = torch.tensor([i for batch in net._seen[12:] for i in batch]).bincount(minlength=24)
    assert drawn.argmax() < 3 and len(net._seen) == 30
    assert all(sorted(i for batch in net._seen[a : a + 6] for i in batch) == [*range(24)] for a in (0, 6)), (
        "plain until something is known"
    )


@pytest.mark.slow
def test_the_gradient_of_a_step_is_unbiased() -> None:
    """Over 1,500 draws of whole runs' steps, at weights that stay, within their error; its moment gives the gain."""
    data, net = uneven(), still(Linear())
    found: list[Tensor] = []

    class Gradients(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            found.append(torch.cat([net.fc.weight.grad.flatten(), net.fc.bias.grad]).clone())  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]

    technique = RobustImportanceSampling(refits=1, smoothing=0.995)
    trainer(technique, Gradients(), max_steps=387).fit(net, DataLoader(data, 4, shuffle=True))
    drawn = torch.stack(found[12:])
    assert len(drawn) * 4 == 1500
    x, y, _ = data.tensors
    whole = torch.autograd.grad(F.cross_entropy(net.fc(x), y), [net.fc.weight, net.fc.bias])
    error = drawn.mean(0) - torch.cat([g.flatten() for g in whole])
    assert (error.abs() < 4.5 * drawn.std(0) / math.sqrt(len(drawn))).all()
    # the gain, at the bias: of 4 even draws against what was drawn
    each = (net.fc(x).softmax(1) - F.one_hot(y, 3)).detach()
    signal = each.mean(0).square().sum()
    even = each.square().sum(1).mean() / 4 + 0.75 * signal
    ours = drawn[:, 12:].square().sum(1).mean()
    assert technique.report()["gain"] == pytest.approx(float(even / ours), rel=0.15) and even / ours > 1.2


def test_steps_are_as_much_longer_as_the_gain_and_schedules_keep_up() -> None:
    data, net = uneven(), still(Linear(lr=1e-9, schedule=True))
    rates: list[tuple[float, float]] = []
    technique = RobustImportanceSampling(refits=1)

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            rates.append((trainer.optimizers[0].param_groups[0]["lr"], float(technique.report()["gain"])))

    t = trainer(technique, Rates(), max_steps=80)
    t.fit(net, DataLoader(data, 4, shuffle=True))
    steps = 0.0
    for rate, gain in rates:
        assert rate == pytest.approx(1e-9 * (1 - math.floor(steps + 1e-9) / 80)), (
            "the schedule is at the effective step"
        )
        steps += gain
    assert len(rates) < 76 and 80 <= steps < 82, "the run ends with its schedule"
    assert technique.report()["effective_steps"] == pytest.approx(steps)
    plain = still(Linear(lr=1e-9, schedule=True))
    t = trainer(RobustImportanceSampling(adapt=False), max_steps=20)
    t.fit(plain, DataLoader(data, 4, shuffle=True))
    assert t.global_step == 20 and t.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-9 * (1 - 20 / 80))


def test_a_step_at_the_gain_is_that_much_longer() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.5)
    first, second = ScaledSteps([optimizer], lambda: 3.0), ScaledSteps([optimizer], lambda: 0.5)
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == -0.75 and optimizer.param_groups[0]["lr"] == 0.5, "two factors are multiplied, and none stays"
    first.remove()
    optimizer.step()
    assert p.item() == -1.0 and optimizer.param_groups[0]["lr"] == 0.5
    second.remove()


def test_samplers_of_the_users_own_say_what_there_is_to_draw() -> None:
    kept = [1, 4, 5, 9, 12, 16, 17, 22]
    data = DataLoader(Numbered(), 4, sampler=torch.utils.data.SubsetRandomSampler(kept))
    net = run(RobustImportanceSampling(refits=1), data, max_steps=20)
    assert {i for batch in net._seen for i in batch} == set(kept) and max(kept) < N


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "vit", "bert"])
def test_tokens_belong_to_their_samples(name: str) -> None:
    """Each sample's norm by autograd at its own logits."""
    net, batch, technique = still_module(name), ragged(name), RobustImportanceSampling()
    samples = [{key: value[i] for key, value in batch.items()} for i in range(4)]
    z, y = logits_and_labels(net, name, batch)
    z = z.detach().requires_grad_()
    mean_loss(z, y).backward()
    assert z.grad is not None
    trainer(technique, max_steps=1).fit(net, DataLoader(samples, 4))  # pyright: ignore[reportArgumentType]
    ((_, indices, norms, weights),) = technique.state_dict()["ranks"][0][0]
    assert indices == [0, 1, 2, 3] and weights is None
    torch.testing.assert_close(norms, 4 * z.grad.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uniform": 0.0}, r"uniform=0.0\): expected a number in \(0, 1\]"),
        ({"uniform": 1.5}, r"uniform=1.5\)"),
        ({"refits": 0}, r"refits=0\): expected an integer >= 1"),
        ({"smoothing": 1.0}, r"smoothing=1.0\): expected a number in \[0, 1\)"),
        ({"labels": "labels"}, r"labels='labels'\): expected a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"RobustImportanceSampling\(" + message):
        RobustImportanceSampling(**arguments)


def test_streams_are_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(8), torch.tensor(1))] * 8)

    with pytest.raises(ValueError, match=r"RobustImportanceSampling: .* streams an iterable data set"):
        trainer(RobustImportanceSampling(), max_steps=2).fit(TinyClassifier(), DataLoader(Stream(), 4))


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "RobustImportanceSampling", {"uniform": 0.2}, max_steps=8)
