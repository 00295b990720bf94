"""Selective-Backprop: who is chosen how often, the plain gradient on those chosen, and its errors."""

import copy
import math
from itertools import permutations
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff._core._run.replicas import Replicas
from lightning_eff._core.losses import LossNotVisible
from lightning_eff.data.curriculum.sequence_length_warmup import SequenceLengthWarmup
from lightning_eff.data.selection import selective_backprop
from lightning_eff.data.selection.selective_backprop import SelectiveBackprop, choose, keep_probabilities
from tests.cases import Case, own_loss
from tests.models import TinyClassifier, TinyGPT, loader, make_batch, module, trainer
from tests.runs import MODES, differences, final_state, fit

CASES = {
    "SelectiveBackprop": Case(
        active=lambda: SelectiveBackprop(keep=0.5, history=16),
        neutral=lambda: SelectiveBackprop(keep=1.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}

MODELS = ["tiny_gpt", "classifier", "gpt2", "llama", "bert", "vit"]


class Gradients(pl.Callback):
    """Keeps the gradient of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: pl.LightningModule, optimizer: Any) -> None:
        self.found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).clone())


def gradient(net: pl.LightningModule, batch: Any, *callbacks: pl.Callback, **kwargs: Any) -> Tensor:
    """The gradient of the first step on ``batch``, of a copy of ``net``."""
    gradients = Gradients()
    data = DataLoader([batch], batch_size=None)
    trainer(*callbacks, gradients, max_steps=1, **kwargs).fit(copy.deepcopy(net), data)
    return gradients.found[0]


def still(name: str) -> pl.LightningModule:
    """The module ``name`` without dropout and without BatchNorm, whose samples depend on each other."""
    if name == "tiny_gpt":
        return TinyGPT(num_layers=2, dropout=0.0)
    if name == "classifier":
        net = TinyClassifier(batch_norm=False)
        net.head[0] = nn.Identity()
        return net
    return module(name, num_layers=2)


def rows_of(batch: Any, index: list[int]) -> Any:
    if isinstance(batch, dict):
        return {key: value[index] for key, value in batch.items()}
    return tuple(value[index] for value in batch)


def sample_means(net: pl.LightningModule, name: str, batch: Any) -> list[float]:
    """Each sample's mean loss, by the module's own loss on that sample alone."""
    found = []
    with torch.no_grad():
        for i in range(len(batch["labels"] if isinstance(batch, dict) else batch[1])):
            one = rows_of(batch, [i])
            if name == "tiny_gpt":
                loss = F.cross_entropy(net(one["input_ids"])[0], one["labels"][0])
            elif name == "classifier":
                loss = F.cross_entropy(net(one[0]), one[1])
            else:
                loss = net.model(**one).loss
            found.append(loss.item())
    return found


class Spy:
    """Stands in for ``choose``: keeps the weights that it is given, and what it chose."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[list[float]] = []
        self.chosen: list[list[int]] = []
        monkeypatch.setattr(selective_backprop, "choose", self)

    def __call__(self, weights: Tensor, k: int, generator: torch.Generator) -> Tensor:
        index = choose(weights, k, generator)
        self.weights.append(weights.tolist())
        self.chosen.append(index.tolist())
        return index


def cdf(loss: float, history: list[float]) -> float:
    return sum(h <= loss for h in history) / len(history)


# -- the rule


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_keep_probabilities(beta: float) -> None:
    g = torch.Generator().manual_seed(0)
    history, losses = torch.randn(50, generator=g), torch.randn(20, generator=g)
    losses[3] = history[7]  # a loss that is in the history counts as at most itself
    losses[4] = history.min() - 1
    expected = [cdf(loss, history.tolist()) ** beta for loss in losses.tolist()]
    assert keep_probabilities(losses, history, beta=beta).tolist() == pytest.approx(expected, rel=1e-12)
    # over losses like those of the history: the mean of CDF^beta is 1 / (1 + beta)
    n = 20_000
    iid = torch.rand(n, generator=g).exp()
    mean = keep_probabilities(torch.rand(n, generator=g).exp(), iid, beta=beta).mean().item()
    assert mean == pytest.approx(1 / (1 + beta), abs=0.01)


def inclusion(weights: list[float], k: int) -> list[float]:
    """How likely each index is among k drawn one by one without replacement, by going through all orders."""
    found = [0.0] * len(weights)
    for order in permutations(range(len(weights)), k):
        chance, left = 1.0, sum(weights)
        for i in order:
            chance *= weights[i] / left
            left -= weights[i]
        for i in order:
            found[i] += chance
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
def test_chosen_as_often_as_the_weights_say(k: int) -> None:
    weights, trials = [0.2, 1.0, 0.5, 0.05, 0.75], 20_000
    g = torch.Generator().manual_seed(0)
    counts = torch.zeros(5)
    for _ in range(trials):
        index = choose(torch.tensor(weights), k, g)
        assert index.tolist() == sorted(set(index.tolist())) and len(index) == k
        counts[index] += 1
    for found, expected in zip((counts / trials).tolist(), inclusion(weights, k), strict=True):
        assert abs(found - expected) < 4.5 * math.sqrt(expected * (1 - expected) / trials)


def test_weights_of_zero_are_chosen_last() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        assert choose(weights, 2, g).tolist() == [1, 3]
        assert set(choose(weights, 3, g).tolist()) > {1, 3}
        assert choose(weights, 5, g).tolist() == [0, 1, 2, 3, 4]
        assert len(choose(torch.zeros(5), 2, g)) == 2


# -- in a run


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_gradient_on_those_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights by hand, and the gradient of the user's mean loss on exactly the chosen samples, not reweighted."""
    net, batch = still(name), make_batch(name, 6, length=12)
    if name not in ("classifier", "vit"):
        batch = dict(batch)
        batch["labels"] = batch["labels"].clone()
        batch["labels"][2, 4:] = -100
        batch["labels"][:, 1:3] = torch.arange(2)
    spy = Spy(monkeypatch)
    found = gradient(net, batch, SelectiveBackprop(keep=0.5, beta=2.0))
    (chosen,), (weights,) = spy.chosen, spy.weights
    means = sample_means(net, name, batch)
    assert weights == pytest.approx([cdf(m, means) ** 2 for m in means], rel=1e-6)
    assert len(chosen) == 3
    assert torch.equal(found, gradient(net, rows_of(batch, chosen)))


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("name", ["tiny_gpt", "classifier"])
def test_keep_of_one_is_plain_training(name: str, mode: str) -> None:
    whole = final_state(*fit(name, list, **MODES[mode]))
    assert differences(whole, final_state(*fit(name, lambda: [SelectiveBackprop(keep=1.0)], **MODES[mode]))) == []


class Sees(TinyClassifier):
    """Notes the samples and the kind of each of its passes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(batch_norm=False, **kwargs)
        self.__dict__["_passes"] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._passes.append((self.global_step, len(batch[0]), torch.is_grad_enabled()))
        return super().training_step(batch, batch_idx)


def test_keep_of_one_costs_no_pass() -> None:
    net = Sees()
    trainer(SelectiveBackprop(keep=1.0), max_steps=3).fit(net, loader("classifier"))
    assert net._passes == [(i, 4, True) for i in range(3)]


@pytest.mark.parametrize(
    ("size", "keep", "k"),
    [(8, 0.5, 4), (7, 0.5, 4), (5, 0.5, 2), (8, 0.33, 3), (10, 0.25, 2), (4, 0.01, 1), (4, 0.99, 4)],
)
def test_exactly_as_many_as_said_in_each_step(size: int, keep: float, k: int) -> None:
    assert k == max(1, round(keep * size))
    net, technique = Sees(), SelectiveBackprop(keep=keep)
    trainer(technique, max_steps=4).fit(net, loader("classifier", 4 * size, size))
    assert [(n, grad) for _, n, grad in net._passes[3:]] == [(size, False), (k, True)] * 4
    assert technique.report() == {"active": 1, "fraction": k / size}
    assert f"trained on {4 * k} of {4 * size} samples" in technique.summary()


def test_accumulation_chooses_in_each_micro_batch() -> None:
    net = Sees()
    trainer(SelectiveBackprop(keep=0.5), max_steps=2, accumulate_grad_batches=2).fit(net, loader("classifier"))
    assert [n for _, n, grad in net._passes if grad] == [2] * 4


def test_acts_between_start_and_end_at_every_interval() -> None:
    net, technique = Sees(), SelectiveBackprop(start=0.2, end=0.8, interval=2)
    trainer(technique, max_steps=10).fit(net, loader("classifier"))
    trained = {step: n for step, n, grad in net._passes if grad}
    assert trained == {step: 2 if step in (2, 4, 6) else 4 for step in range(10)}
    scored = {step for step, _, grad in net._passes if not grad}
    assert scored == {0, 2, 4, 6}, "the first step looks at what is scored later"
    assert technique.state_dict()["steps"] == {"on": 3, "off": 7}
    assert len(technique.state_dict()["losses"]) == 3 * 4, "plain steps leave the history as it is"


def test_plain_steps_are_plain() -> None:
    """Before ``start`` training is the plain one bit for bit."""
    first = _State(2)
    fit("tiny_gpt", lambda: [SelectiveBackprop(start=0.5)], callbacks=[first], max_steps=4)
    plain = _State(2)
    fit("tiny_gpt", list, callbacks=[plain], max_steps=4)
    assert torch.equal(first.weights, plain.weights)
    assert len(plain.weights)


class _State(pl.Callback):
    """The weights after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.weights = torch.empty(0)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.steps:
            self.weights = torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def test_history_holds_the_last_losses_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a list kept by hand, with weights that stay as they are."""
    net = TinyClassifier(lr=0.0, batch_norm=False)
    net.head[0] = nn.Identity()
    batches = [make_batch("classifier", 4, seed=i) for i in range(5)]
    spy, technique = Spy(monkeypatch), SelectiveBackprop(history=10, beta=1.0)
    trainer(technique, max_steps=5).fit(net, DataLoader(batches, batch_size=None))
    history: list[float] = []
    for batch, weights in zip(batches, spy.weights, strict=True):
        means = sample_means(net, "classifier", batch)
        history = [*history, *means][-10:]
        assert weights == pytest.approx([cdf(round(m, 5), [round(h, 5) for h in history]) for m in means])
    saved = technique.state_dict()["losses"]
    assert saved.tolist() == pytest.approx(history, rel=1e-5)
    again = SelectiveBackprop(history=6)
    again.load_state_dict(technique.state_dict())
    assert again.state_dict()["losses"].tolist() == saved.tolist()[-6:]


def test_a_history_shorter_than_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    trainer(SelectiveBackprop(history=1), max_steps=3).fit(still("classifier"), loader("classifier", 24, 8))
    for weights, chosen in zip(spy.weights, spy.chosen, strict=True):
        assert set(weights) <= {0.0, 1.0} and len(chosen) == 4


def test_hard_samples_are_chosen_as_often_as_their_cdf_says() -> None:
    """One of four chosen at fixed weights: sample i in ``CDF_i^2 / sum CDF^2`` of the steps."""
    net = Sees(lr=0.0)
    net.head[0] = nn.Identity()
    batch = make_batch("classifier", 4)
    losses = torch.tensor(sample_means(net, "classifier", batch))
    counts, steps = [0] * 4, 600
    original = Sees.training_step

    def training_step(self: Sees, chosen: Any, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled():
            counts[[torch.equal(chosen[0][0], x) for x in batch[0]].index(True)] += 1
        return original(self, chosen, batch_idx)

    net.training_step = training_step.__get__(net)
    technique = SelectiveBackprop(keep=0.25, beta=2.0)
    trainer(technique, max_steps=steps, logger=False).fit(net, DataLoader([batch] * steps, batch_size=None))
    ranks = losses.argsort().argsort() + 1
    expected = (ranks**2 / (ranks**2).sum()).tolist()
    for found, p in zip(counts, expected, strict=True):
        assert abs(found / steps - p) < 4 * math.sqrt(p * (1 - p) / steps)
    assert sum(counts) == steps


def test_beta_of_zero_draws_uniformly(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    trainer(SelectiveBackprop(beta=0.0, history=1), max_steps=2).fit(still("classifier"), loader("classifier"))
    assert spy.weights == [[1.0] * 4] * 2


def test_choices_differ_by_step_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(rank: int) -> list[list[int]]:
        spy = Spy(monkeypatch)
        pl.seed_everything(0, verbose=False)
        technique = SelectiveBackprop()
        sets = pl.Callback()
        sets.on_train_start = lambda *args: setattr(technique.session, "rank", rank)
        data = DataLoader([make_batch("classifier", 16)] * 3, batch_size=None)
        trainer(technique, sets, max_steps=3).fit(still("classifier"), data)
        return spy.chosen

    first = chosen(0)
    assert first == chosen(0) != chosen(1)
    assert first[0] != first[1] != first[2]


def test_the_history_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(self: Any, value: Any) -> list[Any]:
        return [value] if not isinstance(value, tuple) or value[1] is None else [(None, [0.5, 0.25]), value]

    monkeypatch.setattr(Replicas, "everyone", both)
    monkeypatch.setattr(Replicas, "of_replicas", lambda self, every: every)
    net, batch = still("classifier"), make_batch("classifier", 4)
    technique = SelectiveBackprop()
    gradient(net, batch, technique)
    expected = [0.5, 0.25, *sample_means(net, "classifier", batch)]
    assert technique.state_dict()["losses"].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_sample_of_several_rows_is_chosen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downstream, one sequence of 12 becomes three of 4: three for each that is chosen."""
    net, batch = still("tiny_gpt"), make_batch("tiny_gpt", 4, length=12)
    spy = Spy(monkeypatch)

    def warmup() -> SequenceLengthWarmup:
        return SequenceLengthWarmup(start=4, until=1.0, multiple_of=4)

    found = gradient(net, batch, SelectiveBackprop(), warmup())
    rows = {key: value.reshape(12, 4) for key, value in batch.items()}
    each = torch.tensor(sample_means(net, "tiny_gpt", rows)).reshape(4, 3).mean(1).tolist()
    assert spy.weights[0] == pytest.approx([cdf(m, each) for m in each])
    assert torch.equal(found, gradient(net, rows_of(batch, spy.chosen[0]), warmup()))


def test_gradients_under_bf16_are_those_of_the_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scoring pass must leave no weights without a graph in autocast's cache."""
    net, batch = still("tiny_gpt"), make_batch("tiny_gpt", 4)
    spy = Spy(monkeypatch)
    found = gradient(net, batch, SelectiveBackprop(), precision="bf16-mixed")
    assert torch.equal(found, gradient(net, rows_of(batch, spy.chosen[0]), precision="bf16-mixed"))


# -- losses that cannot be seen


class OwnLoss(TinyClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.logsumexp(self(batch[0]), dim=1).mean()


def told(net: pl.LightningModule, batch: Any) -> Tensor:
    return torch.logsumexp(net(batch[0]), dim=1)


def test_a_loss_that_cannot_be_seen_is_an_error_at_the_first_step() -> None:
    t = trainer(SelectiveBackprop(), max_steps=3)
    with pytest.raises(LossNotVisible, match=r"SelectiveBackprop: training_step .*Give sample_loss=, a function"):
        t.fit(OwnLoss(), loader("classifier"))
    assert t.global_step == 0


def test_sample_loss_chooses_and_training_step_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    net = OwnLoss(batch_norm=False)
    net.head[0] = nn.Identity()
    batch = make_batch("classifier", 6)
    spy = Spy(monkeypatch)
    found = gradient(net, batch, SelectiveBackprop(sample_loss=told))
    losses = told(net, batch).tolist()
    assert spy.weights[0] == pytest.approx([cdf(loss, losses) for loss in losses])
    assert torch.equal(found, gradient(net, rows_of(batch, spy.chosen[0])))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_step_stays_skipped() -> None:
    class Skips(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    sizes: list[int] = []
    technique = SelectiveBackprop()
    t = trainer(technique, max_epochs=1)
    t.fit(Skips(), loader("classifier", 16))
    assert len(technique.state_dict()["losses"]) == 12
    assert sizes[3:] == [4, 2, 4, 4, 4, 2, 4, 2], "nothing is chosen for the step that is skipped"


# -- bad input


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_selection_does_not_hide_a_loss_that_is_not_finite(value: float) -> None:
    class Breaks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self(batch[0])
            if self.global_step == 2:
                z = z * torch.tensor([1.0, value, 1.0, value])[:, None]
            return F.mse_loss(z, torch.zeros_like(z))

    t = trainer(SelectiveBackprop(), max_steps=5)
    with pytest.raises(
        ValueError, match=r"SelectiveBackprop: .* sample\(s\) 1, 3 of the 4 in batch 2 .*samples would hide"
    ):
        t.fit(Breaks(batch_norm=False), loader("classifier"))
    assert t.global_step == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0\): expected a number in \(0, 1\]"),
        ({"keep": 1.5}, r"keep=1.5\): expected a number in \(0, 1\]"),
        ({"keep": -0.5}, r"keep=-0.5\)"),
        ({"keep": math.nan}, r"keep=nan\)"),
        ({"beta": -1.0}, r"beta=-1.0\): expected a finite number >= 0"),
        ({"beta": math.inf}, r"beta=inf\)"),
        ({"start": -0.1}, r"start=-0.1\): expected a number in \[0, 1\)"),
        ({"end": 1.1}, r"end=1.1\): expected a number in \(0, 1\]"),
        ({"start": 0.5, "end": 0.5}, r"start=0.5, end=0.5\): start must be below end"),
        ({"interval": 0}, r"interval=0\): expected an integer >= 1: the number of optimizer steps"),
        ({"interval": 1.5}, r"interval=1.5\)"),
        ({"history": 0}, r"history=0\): expected an integer >= 1: the number of recent losses in the CDF"),
        ({"history": True}, r"history=True\)"),
        ({"sample_loss": 3}, r"sample_loss=3\): expected a function of \(module, batch\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"SelectiveBackprop\(" + message):
        SelectiveBackprop(**arguments)


def test_a_run_without_end_is_refused_where_the_budget_counts() -> None:
    t = trainer(SelectiveBackprop(start=0.5), max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"start=0.5, end=1.0\): the Trainer has no end .*or use start=0 and end=1"):
        t.fit(TinyClassifier(), loader("classifier"))

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    technique = SelectiveBackprop()
    trainer(technique, Stops(), max_steps=-1, max_epochs=-1).fit(TinyClassifier(), loader("classifier"))
    assert technique.state_dict()["steps"]["on"] >= 3


def test_nothing_to_choose_from() -> None:
    t = trainer(SelectiveBackprop(), max_steps=2)
    with pytest.raises(ValueError, match=r"SelectiveBackprop: got a batch of 1 sample; expected several.*batch_size"):
        t.fit(TinyGPT(num_layers=1), loader("tiny_gpt", 4, 1))
