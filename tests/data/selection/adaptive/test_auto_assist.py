"""AutoAssist: who is picked how often, the plain gradient on those picked, how the assistant learns, and its errors."""

import copy
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.data.selection.adaptive import auto_assist
from lightning_eff.data.selection.adaptive._assistant import HashedLogistic
from lightning_eff.data.selection.adaptive.auto_assist import AutoAssist, pick, pick_probabilities
from tests.cases import Case, own_loss
from tests.data.selection.test_selective_backprop import MODELS, gradient, rows_of, sample_means, still
from tests.models import TinyClassifier, TinyGPT, loader, make_batch, trainer
from tests.runs import differences, final_state, fit, fit_yaml, plain

CASES = {
    "AutoAssist": Case(
        active=lambda: AutoAssist(gamma=0.3, lr=0.5),
        neutral=lambda: AutoAssist(gamma=1.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}


class First(nn.Module):
    """Each sample's first feature times a weight: what it says of a batch is known."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        return self.scale * batch[0][:, 0]


class Picks:
    """Stands in for ``pick``: keeps the chances that it is given, and what it picked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chances: list[list[float]] = []
        self.picked: list[list[int]] = []
        monkeypatch.setattr(auto_assist, "pick", self)

    def __call__(self, q: Tensor, generator: torch.Generator) -> Tensor:
        index = pick(q, generator)
        self.chances.append(q.tolist())
        self.picked.append(index.tolist())
        return index


# -- the rule


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.8, 1.0])
def test_picked_fractions(gamma: float) -> None:
    """Over 8,000 draws each sample comes as often as ``gamma + (1 - gamma) p`` says."""
    p, trials = torch.tensor([0.02, 0.3, 0.5, 0.99, 1.0]), 8_000
    g = torch.Generator().manual_seed(0)
    counts = torch.zeros(5)
    for _ in range(trials):
        index = pick(pick_probabilities(p, gamma=gamma), g, least=0)
        assert index.tolist() == sorted(set(index.tolist()))
        counts[index] += 1
    for found, one in zip((counts / trials).tolist(), p.tolist(), strict=True):
        expected = gamma + (1 - gamma) * one
        assert abs(found - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / trials) + 1e-9


def test_two_are_picked_at_least() -> None:
    q = torch.tensor([0.0, 1e-3, 1e-12, 2e-3])
    assert pick(q, torch.Generator().manual_seed(0)).tolist() == [1, 3]
    assert pick(q[:1], torch.Generator().manual_seed(0)).tolist() == [0]


def test_a_run_picks_as_often_as_its_assistant_says() -> None:
    """Of a fixed assistant, in 250 steps of 8 samples: each sample's share, by hand from its own features."""

    class Counts(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled():
                counts[batch[1]] += 1
            return F.cross_entropy(self(batch[0]), batch[1] % 3)

    counts, steps, gamma = torch.zeros(8), 250, 0.2
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.linspace(-4, 3, 8)
    batch = (x, torch.arange(8))  # the label says who it is
    technique = AutoAssist(gamma=gamma, assistant=First(), lr=1e-12)
    trainer(technique, max_steps=steps).fit(
        Counts(batch_norm=False), DataLoader(cast(Any, [batch] * steps), batch_size=None)
    )
    expected = gamma + (1 - gamma) / (1 + (-x[:, 0]).exp())
    assert ((counts / steps - expected).abs() < 4.5 * (expected * (1 - expected) / steps).sqrt()).all()
    seen = technique.state_dict()["samples"]
    assert seen == {"seen": 8 * steps, "trained": int(counts.sum())}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_plain_one_on_those_picked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not reweighted; on hand-written and Hugging Face modules."""
    net, batch = still(name), make_batch(name, 6, length=12)
    picks = Picks(monkeypatch)
    found = gradient(net, batch, AutoAssist(gamma=0.4))
    assert 0 < len(picks.picked[0]) < 6
    assert picks.chances[0] == [0.7] * 6  # an assistant that knows nothing
    assert torch.equal(found, gradient(net, rows_of(batch, picks.picked[0])))


def test_everything_picked_is_the_plain_run_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the draws happen to pick all, with the assistant learning beside it, and as ``gamma=1``."""
    monkeypatch.setattr(auto_assist, "pick", lambda q, generator: torch.arange(len(q)))
    for technique in (AutoAssist(gamma=0.5), AutoAssist(gamma=1.0)):
        net, t = fit("tiny_gpt", lambda technique=technique: [technique])
        assert not differences(final_state(net, t), plain("tiny_gpt")[1])


# -- the assistant


@pytest.mark.parametrize("name", ["classifier", "gpt2"])
def test_the_assistant_learns_from_the_losses_of_those_picked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of AdaGrad on the cross-entropy, and the threshold, by hand."""
    net: Any = still(name)
    batch = make_batch(name, 6, length=12)
    monkeypatch.setattr(net, "configure_optimizers", lambda: torch.optim.SGD(net.parameters(), 0.0))
    picks = Picks(monkeypatch)
    technique = AutoAssist(gamma=0.5, num_buckets=64, lr=0.3, smoothing=0.75)
    trainer(technique, max_steps=2).fit(net, DataLoader(cast(Any, [batch] * 2), batch_size=None))
    losses = sample_means(net, name, batch)
    reference = HashedLogistic(64)
    threshold: float | None = None
    squares: dict[str, Any] = {}
    for index in picks.picked:
        mean = sum(losses[i] for i in index) / len(index)
        threshold = mean if threshold is None else 0.75 * threshold + 0.25 * mean
        z = torch.tensor([float(losses[i] > threshold) for i in index])
        p = torch.sigmoid(reference(rows_of(batch, index)))
        # d/dg of the mean of -z log p - (1 - z) log(1 - p) is (p - z) / n
        reference.zero_grad()
        p_minus_z = ((p - z) / len(index)).detach()
        reference(rows_of(batch, index)).backward(p_minus_z)
        for key, w in reference.named_parameters():
            assert w.grad is not None
            squares[key] = squares.get(key, 0) + w.grad.square()
            w.data -= 0.3 * w.grad / (squares[key].sqrt() + 1e-10)
    state = technique.state_dict()["assistant"]
    assert state["threshold"] == pytest.approx(threshold, rel=1e-5)
    for key, w in reference.named_parameters():
        assert w.abs().max() > 0.01
        torch.testing.assert_close(state["net"][key], w.detach(), rtol=1e-4, atol=1e-6)


def test_hashed_features_by_hand() -> None:
    """Bags of whole numbers and their mean, places of floating ones: with one weight for all, counts come back."""
    net = HashedLogistic(1)
    net.w.data.fill_(2.0)
    net.bias.data.fill_(0.5)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert net({"ids": ids}).tolist() == [2.5, 2.5]
    x = torch.tensor([[1.0, 3.0], [0.5, -0.5]])
    torch.testing.assert_close(net((x,)), 0.5 + 2 * x.sum(dim=1) / math.sqrt(2))
    wide = HashedLogistic(1 << 16)
    with torch.no_grad():
        wide.w.normal_()
    same, other = wide({"ids": ids, "y": torch.tensor([0, 0])}), wide({"ids": ids, "y": torch.tensor([0, 1])})
    assert torch.equal(same[0], other[0]) and not torch.equal(same[1], other[1])
    moved = wide({"ids": ids[:, [2, 0, 1]], "y": torch.tensor([0, 0])})
    torch.testing.assert_close(moved, same)  # a bag has no order
    images = torch.rand(2, 3, 32, 32)
    assert wide((images, torch.tensor([1, 1]))).shape == (2,)
    assert wide((torch.full((2, 4), -math.inf),)).isfinite().all()


def test_easy_samples_become_rare() -> None:
    """Half of the samples, told by one feature, have a loss of nothing: they come as rarely as ``gamma`` lets them."""

    class Planted(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            easy = batch[0][:, 0] > 0
            if torch.is_grad_enabled() and self.global_step >= 60:
                trained.append((int(easy.sum()), len(easy)))
            z = self(batch[0]) * 0 + 20.0 * F.one_hot(batch[1], 3) * easy[:, None]
            return F.cross_entropy(z, batch[1])

    trained: list[tuple[int, int]] = []
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    x[:, 0] = x[:, 0].sign() * 2
    y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))
    batches = [(x[i::4], y[i::4]) for i in range(4)] * 30
    technique = AutoAssist(gamma=0.1, num_buckets=1 << 12, lr=0.5)
    trainer(technique, max_steps=120).fit(Planted(batch_norm=False), DataLoader(cast(Any, batches), batch_size=None))
    assert technique.report()["accuracy"] > 0.97
    easy, every = (sum(column) for column in zip(*trained, strict=True))
    share = float((x[:, 0] > 0).float().mean()) * 60 * 16
    assert easy / share < 0.1 + 4.5 * math.sqrt(0.09 / share) + 0.05
    assert (every - easy) / (60 * 16 - share) > 0.9


def test_it_learns_before_it_picks_and_a_given_assistant_stays_as_it_is() -> None:
    class Drops(First):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, batch: Any) -> Tensor:
            return self.scale * self.drop(self.norm(batch[0])).sum(dim=1)

    class Sees(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled():
                sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    sizes: list[int] = []
    given = Drops()
    before = copy.deepcopy(given.state_dict())
    technique = AutoAssist(gamma=0.0, assistant=given, start=0.5)
    trainer(technique, max_steps=8).fit(Sees(), loader("classifier"))
    assert sizes[:4] == [4] * 4 and min(sizes[4:]) == 2
    assert all(torch.equal(value, before[key]) for key, value in given.state_dict().items())
    assert not torch.equal(technique.state_dict()["assistant"]["net"]["scale"], before["scale"])
    assert technique.report().keys() == {"active", "fraction", "threshold", "accuracy"}


def test_a_given_assistant_resumes(tmp_path: Path) -> None:
    """One that draws and has statistics, from the middle of the run, bit for bit."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))

        def forward(self, batch: Any) -> Tensor:
            return self.net(batch[0])

    def build() -> list[Any]:
        return [AutoAssist(gamma=0.2, assistant=Takes(), lr=0.3)]

    net, t = fit("classifier", build, directory=tmp_path)
    resumed = fit("classifier", build, resume=tmp_path / "step=5.ckpt")
    assert not differences(final_state(*resumed), final_state(net, t))


def test_sample_loss_is_what_the_assistant_learns_from() -> None:
    def told(net: Any, batch: Any) -> Tensor:
        return batch[0][:, 0].exp()

    net, technique = TinyGPT(num_layers=2), AutoAssist(sample_loss=lambda net, batch: batch["labels"][:, 0].float())
    trainer(technique, max_steps=3).fit(net, loader("tiny_gpt"))
    assert technique.state_dict()["assistant"]["threshold"] > 1
    technique = AutoAssist(sample_loss=told)
    trainer(technique, max_steps=3).fit(own_loss(), loader("classifier"))
    assert technique.state_dict()["samples"]["trained"] < 12


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": -0.1}, r"gamma=-0.1\): expected a number in \[0, 1\]"),
        ({"gamma": 1.5}, r"gamma=1.5\)"),
        ({"assistant": 3}, r"assistant=3\): expected a module"),
        ({"assistant": nn.ReLU()}, r"assistant=ReLU\(...\)\): the module has no trainable parameters"),
        ({"num_buckets": 0}, r"num_buckets=0\): expected an integer >= 1"),
        ({"lr": 0.0}, r"lr=0.0\): expected a finite number > 0"),
        ({"smoothing": 1.0}, r"smoothing=1.0\): expected a number in \[0, 1\)"),
        ({"start": 1.1}, r"start=1.1\): expected a number in \[0, 1\]: the fraction of the budget"),
        ({"sample_loss": 3}, r"sample_loss=3\): expected a function"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"AutoAssist\(" + message):
        AutoAssist(**arguments)


def test_an_assistant_of_the_wrong_shape_is_refused() -> None:
    class Wide(First):
        def forward(self, batch: Any) -> Tensor:
            return self.scale * batch[0]

    with pytest.raises(ValueError, match=r"it returned shape \(4, 8\) for a batch of 4 samples; expected one logit"):
        trainer(AutoAssist(assistant=Wide()), max_steps=2).fit(TinyClassifier(), loader("classifier"))


def test_a_loss_that_is_not_finite_is_refused() -> None:
    class Breaks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            z = self(batch[0]) * (math.nan if self.global_step == 1 else 1.0)
            return loss * 0 + F.cross_entropy(z, batch[1])

    with pytest.raises(ValueError, match="AutoAssist"):
        trainer(AutoAssist(), max_steps=3).fit(Breaks(), loader("classifier"))


def test_a_start_needs_a_budget() -> None:
    t = trainer(AutoAssist(start=0.5), max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"start=0.5\): the Trainer has no end .* or use start=0"):
        t.fit(TinyClassifier(), loader("classifier"))


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "AutoAssist", {"gamma": 0.3, "num_buckets": 64}, max_steps=4)
