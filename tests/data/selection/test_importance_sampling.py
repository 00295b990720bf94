"""Importance sampling: unbiased on every model, as much variance less as tau says, and its errors."""

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_eff._core._run.replicas import Replicas
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.losses import LossNotVisible
from lightning_eff._core.steps import Stage
from lightning_eff.data.curriculum.sequence_length_warmup import SequenceLengthWarmup
from lightning_eff.data.selection import importance_sampling
from lightning_eff.data.selection.importance_sampling import (
    ImportanceSampling,
    default_threshold,
    draw,
    probabilities,
    variance_reduction,
)
from lightning_eff.data.selection.selective_backprop import SelectiveBackprop
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from tests.cases import Case, own_loss
from tests.core.nop import Nop
from tests.models import TinyClassifier, TinyGPT, flat, loader, make_batch, module, trainer
from tests.runs import differences, final_state, fit

CASES = {
    "ImportanceSampling": Case(
        active=lambda: ImportanceSampling(presample=2.0, threshold=0.5),
        neutral=lambda: ImportanceSampling(threshold=math.inf),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}

B = 4


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


def plain_gradient(net: pl.LightningModule, loss: Callable[[pl.LightningModule], Tensor]) -> Tensor:
    """The gradient of ``loss`` by autograd alone."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss(net), [*net.parameters()])])


def still(name: str) -> pl.LightningModule:
    """The module ``name`` without dropout and without BatchNorm, whose samples depend on each other."""
    if name == "tiny_gpt":
        return TinyGPT(num_layers=2, dropout=0.0)
    if name == "classifier":
        net = TinyClassifier(batch_norm=False)
        net.head[0] = nn.Identity()
        return net
    return module(name, num_layers=2)


def ragged(name: str, size: int = B) -> Any:
    """A batch in which samples count differently many tokens, where there are tokens."""
    batch = make_batch(name, size, length=12)
    if name not in ("classifier", "vit"):
        batch = dict(batch)
        labels = batch["labels"].clone()
        for i in range(size):
            labels[i, 2 + 3 * i :] = -100
        labels[0, 1] = 1  # for BERT, whose other labels may all be ignored
        batch["labels"] = labels
    return batch


def logits_and_labels(net: pl.LightningModule, name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """What enters the loss, (B, T, C) and (B, T), or (B, C) and (B,)."""
    if name == "classifier":
        return net(batch[0]), batch[1]
    if name == "tiny_gpt":
        return net(batch["input_ids"]), batch["labels"]
    z = net.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return (z[:, :-1], batch["labels"][:, 1:]) if name in ("gpt2", "llama") else (z, batch["labels"])


def mean_loss(z: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy over all that count."""
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1))


def by_hand(net: pl.LightningModule, name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Each sample's ``||softmax(z) - onehot||`` over its tokens that count, and summed loss."""
    with torch.no_grad():
        z, y = logits_and_labels(net, name, batch)
    z, y = z.reshape(len(y), -1, z.shape[-1]).double(), y.reshape(len(y), -1)
    norms, sums = torch.zeros(len(y)).double(), torch.zeros(len(y)).double()
    for i in range(len(y)):
        for t in range(y.shape[1]):
            if y[i, t] != -100:
                p = torch.exp(z[i, t]) / torch.exp(z[i, t]).sum()
                sums[i] -= torch.log(p[y[i, t]])
                p[y[i, t]] -= 1
                norms[i] += p.square().sum()
    return norms.sqrt(), sums


def drawing(*index: int) -> Callable[..., Tensor]:
    return lambda p, b, generator: torch.tensor(index)


MODELS = ["tiny_gpt", "classifier", "gpt2", "llama", "bert", "vit"]


# -- the rule


def test_variance_reduction_is_the_paper_s() -> None:
    for seed in range(5):
        p = torch.rand(7, generator=torch.Generator().manual_seed(seed)).double()
        p /= p.sum()
        inverse = math.sqrt(1 - sum((float(q) - 1 / 7) ** 2 for q in p) / sum(float(q) ** 2 for q in p))
        assert variance_reduction(p) == pytest.approx(1 / inverse, rel=1e-12)
    for size in (1, 2, 3, 7, 640):  # equal scores
        assert variance_reduction(probabilities(torch.full((size,), 0.3))) == pytest.approx(1, abs=1e-12)
        assert variance_reduction(probabilities(torch.full((size,), 0.3))) >= 1
    assert variance_reduction(torch.tensor([0.0, 1.0, 0, 0])) == 2


def test_probabilities() -> None:
    assert probabilities(torch.tensor([1.0, 3.0, 0.0])).tolist() == [0.25, 0.75, 0]
    assert probabilities(torch.zeros(4)).tolist() == [0.25] * 4
    tiny = probabilities(torch.tensor([1e-40, 3e-40]))
    torch.testing.assert_close(tiny, torch.tensor([0.25, 0.75]).double(), rtol=1e-4, atol=0)


def test_threshold_is_the_paper_s() -> None:
    assert default_threshold(640, 128) == pytest.approx(8 / 3)
    assert default_threshold(12, 4) == 2


def test_draws_follow_p_and_never_take_a_zero() -> None:
    p = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0]).double()
    found = draw(p, 200_000, torch.Generator().manual_seed(0))
    counts = torch.bincount(found, minlength=6).double() / 200_000
    assert counts[p == 0].sum() == 0
    assert (counts - p).abs().max() < 4 * math.sqrt(0.25 / 200_000)
    assert found[:-1].ne(found[1:]).any() and found.dtype == torch.long
    pairs = torch.bincount(found[:-1] * 6 + found[1:], minlength=36).reshape(6, 6).double() / 200_000
    assert (pairs - p[:, None] * p).abs().max() < 0.005, "draws are independent"


def test_a_number_next_to_one_draws_a_sample_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor([0.0, 1 - 2**-53, 1.0]).double())
    p = torch.tensor([0.0, 0.5, 0.5, 0.0]).double()
    assert draw(p, 3, torch.Generator()).tolist() == [1, 2, 2]


# -- the property: unbiased, and less variance


@pytest.mark.parametrize("score", ["gradient_bound", "loss"])
@pytest.mark.parametrize("name", MODELS)
def test_mean_over_draws_is_the_full_gradient(name: str, score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``sum_i p_i w_i grad l_i = grad L``, with every draw of b = 1 made once; p by hand."""
    net, batch = still(name), ragged(name)
    norms, sums = by_hand(net, name, batch)
    p = (norms if score == "gradient_bound" else sums) / (norms if score == "gradient_bound" else sums).sum()
    full = plain_gradient(net, lambda net: mean_loss(*logits_and_labels(net, name, batch)))
    mean = torch.zeros_like(full)
    for i in range(B):
        monkeypatch.setattr(importance_sampling, "draw", drawing(i))
        technique = ImportanceSampling(presample=B, score=score, threshold=0.0, smoothing=0.0)
        mean += p[i] * gradient(net, batch, technique)
        assert technique.report()["tau"] == pytest.approx(math.sqrt(B * p.square().sum()), rel=1e-5)
        assert technique.report()["fraction"] == 1 / B
    torch.testing.assert_close(mean, full, rtol=2e-4, atol=2e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own, in plain Lightning too
@pytest.mark.parametrize("variant", ["accumulate", "bf16", "compiled", "checkpointed", "reshaped", "sam_off"])
def test_mean_over_draws_is_the_full_gradient_elsewhere(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = still("tiny_gpt"), ragged("tiny_gpt")
    kwargs: dict[str, Any] = {}
    others: list[Callable[[], pl.Callback]] = []
    tolerance = {"rtol": 2e-4, "atol": 2e-6}
    if variant == "bf16":
        kwargs["precision"] = "bf16-mixed"
        tolerance = {"rtol": 3e-2, "atol": 3e-3}
    if variant == "compiled":
        net.head = torch.compile(net.head, backend="eager")
    if variant == "checkpointed":
        block = net.blocks[0]
        forward = block.forward
        block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    if variant == "reshaped":  # at u = 0 the twelve tokens of a sample become rows of 4
        others.append(lambda: SequenceLengthWarmup(start=4, until=1.0, multiple_of=4))
    if variant == "sam_off":
        others.append(lambda: SharpnessAwareMinimization(rho=0.05, interval=1))
        monkeypatch.setattr(SharpnessAwareMinimization, "_climb", lambda self, step, loss: None)
    p, _ = by_hand(net, "tiny_gpt", batch)
    if variant == "reshaped":
        rows = {key: value.reshape(3 * B, 4) for key, value in batch.items()}
        norms, _ = by_hand(net, "tiny_gpt", rows)
        p = norms.square().reshape(B, 3).sum(1).sqrt()
    p = p / p.sum()
    full = gradient(net, batch, *(make() for make in others), **kwargs)
    mean = torch.zeros_like(full)
    for i in range(B):
        monkeypatch.setattr(importance_sampling, "draw", drawing(i))
        technique = ImportanceSampling(presample=B, threshold=0.0)
        if variant == "accumulate":
            kwargs = {"accumulate_grad_batches": 2, "limit_train_batches": 2}
            gradients = Gradients()
            data = DataLoader([batch, batch], batch_size=None)
            trainer(technique, gradients, max_steps=1, **kwargs).fit(copy.deepcopy(net), data)
            mean += p[i] * gradients.found[0]
            assert technique.state_dict()["samples"] == {"seen": 2 * B, "trained": 2}
        else:
            mean += p[i] * gradient(net, batch, technique, *(make() for make in others), **kwargs)
    torch.testing.assert_close(mean, full, **tolerance)


def test_several_draws_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """b = 3 with one sample twice: the mean of the three weighted gradients."""
    net, batch = still("gpt2"), ragged("gpt2")
    norms, _ = by_hand(net, "gpt2", batch)
    p = norms / norms.sum()
    index = [2, 0, 2]
    monkeypatch.setattr(importance_sampling, "draw", drawing(*index))
    found = gradient(net, batch, ImportanceSampling(presample=4 / 3, threshold=0.0))
    valid = (batch["labels"][:, 1:] != -100).sum()
    expected = torch.zeros_like(found)
    for i in index:

        def loss(net: pl.LightningModule, i: int = i) -> Tensor:
            z = net.model(batch["input_ids"][i : i + 1]).logits[0, :-1]
            return F.cross_entropy(z, batch["labels"][i, 1:], reduction="sum") * B / valid / (B * p[i]).float()

        expected += plain_gradient(net, loss) / 3
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)


def test_second_moments_shrink_by_tau_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear softmax on inputs of norm 1: the score is the gradient's norm, so the ratio is ``tau^2`` exactly."""

    class Linear(TinyClassifier):
        def __init__(self) -> None:
            super().__init__(batch_norm=False)
            self.blocks, self.head = nn.Identity(), nn.Linear(8, 3, bias=False)

    size = 8
    x = F.normalize(make_batch("classifier", size)[0], dim=1)
    net = Linear()
    net.head.weight.data.mul_(20)
    y = net(x).argmax(dim=1)
    y[:2] = (y[:2] + 1) % 3  # two wrong labels among easy samples
    batch = (x, y)
    each = [
        plain_gradient(net, lambda n, i=i: F.cross_entropy(n(batch[0][i : i + 1]), y[i : i + 1])) for i in range(size)
    ]
    norms = torch.stack([g.norm() for g in each])
    p = norms / norms.sum()
    uniform = norms.square().mean()
    ours = 0.0
    for i in range(size):
        monkeypatch.setattr(importance_sampling, "draw", drawing(i))
        technique = ImportanceSampling(presample=size, threshold=0.0, smoothing=0.0)
        ours += p[i] * gradient(net, batch, technique).norm() ** 2
    tau = technique.report()["tau"]
    assert tau > 1.2
    assert (uniform / ours).item() == pytest.approx(tau**2, rel=1e-4)


def test_equal_scores_make_tau_one() -> None:
    net = still("classifier")
    x, y = make_batch("classifier", 1)
    technique = ImportanceSampling(smoothing=0.0)
    gradient(net, (x.expand(6, 8).clone(), y.expand(6).clone()), technique)
    assert technique.report()["tau"] == pytest.approx(1.0, abs=1e-6)


def test_where_all_score_zero_draws_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(importance_sampling, "draw", lambda p, b, generator: seen.append(p) or torch.tensor([1]))

    class Certain(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch[0]) * 0, torch.zeros(len(batch[0]), 3))

    net = Certain(batch_norm=False)
    assert gradient(net, make_batch("classifier", B), ImportanceSampling(presample=B, threshold=0.0)).abs().max() == 0
    assert seen[0].tolist() == [0.25] * B


# -- the switch


def tau_by_hand(net: TinyClassifier, batches: list[Any], *, smoothing: float, lr: float) -> list[float]:
    """``tau`` after each step of plain SGD over ``batches``, in a loop of its own."""
    tau, found = 0.0, []
    for x, y in batches:
        z = net(x)
        with torch.no_grad():
            g = (z.softmax(1) - F.one_hot(y, 3)).norm(dim=1).double()
        q = g / g.sum()
        now = 1 / math.sqrt(1 - ((q - 1 / len(x)) ** 2).sum() / q.square().sum())
        tau = smoothing * tau + (1 - smoothing) * now
        found.append(tau)
        for p, d in zip(net.parameters(), torch.autograd.grad(F.cross_entropy(z, y), [*net.parameters()]), strict=True):
            p.data -= lr * d
    return found


class Taus(pl.Callback):
    def __init__(self, technique: ImportanceSampling) -> None:
        self.technique = technique
        self.found: list[float] = []
        self.active: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(float(self.technique.report()["tau"]))
        self.active.append(float(self.technique.report()["active"]))


def test_tau_is_read_off_plain_training() -> None:
    net = still("classifier")
    net.momentum = 0.0
    batches = [make_batch("classifier", 6, seed=i) for i in range(10)]
    expected = tau_by_hand(copy.deepcopy(net), batches, smoothing=0.9, lr=net.lr)
    technique = ImportanceSampling()
    taus = Taus(technique)
    passes: list[int] = []
    net.head.register_forward_hook(lambda *args: passes.append(1))
    trainer(technique, taus, max_steps=10).fit(net, DataLoader(batches, batch_size=None))
    assert taus.found == pytest.approx(expected, rel=1e-4)
    assert taus.active == [0] * 10
    assert len(passes) == 10 + 3, "one pass for each step, and three that look at the first batch"


def test_switches_on_where_tau_exceeds_the_threshold() -> None:
    net = still("classifier")
    net.momentum = 0.0
    batches = [make_batch("classifier", 6, seed=i) for i in range(12)]
    expected = tau_by_hand(copy.deepcopy(net), batches, smoothing=0.5, lr=net.lr)
    threshold = 1.0 + 1e-9
    on_from = next(i for i, tau in enumerate(expected) if tau > threshold) + 1
    assert 1 < on_from < 11
    technique = ImportanceSampling(threshold=threshold, smoothing=0.5)
    taus = Taus(technique)
    trainer(technique, taus, max_steps=12).fit(net, DataLoader(batches, batch_size=None))
    assert taus.found[:on_from] == pytest.approx(expected[:on_from], rel=1e-4)
    assert taus.active[: on_from + 1] == [0] * on_from + [1]
    assert "drew samples in" in technique.summary() and "of 72 samples" in technique.summary()
    assert technique.state_dict()["steps"]["on"] == sum(taus.active)


def test_the_default_threshold_is_that_of_the_batch() -> None:
    """Six samples in which one alone counts: tau = sqrt(6) > (6 + 3 * 2) / (3 * 2) = 2."""

    class OneCounts(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = torch.full_like(batch[1], -100)
            y[batch[1] == 2] = 2
            return F.cross_entropy(self(batch[0]), y)

    net = OneCounts(batch_norm=False)
    x = torch.randn(6, 8)
    for hard, on in ((1, True), (2, False)):  # sqrt(6) = 2.45, sqrt(3) = 1.7
        y = torch.tensor([2] * hard + [0] * (6 - hard))
        technique = ImportanceSampling(smoothing=0.0)
        taus = Taus(technique)
        trainer(technique, taus, max_steps=2).fit(copy.deepcopy(net), DataLoader([(x, y)] * 2, batch_size=None))
        assert taus.active == [0, float(on)]


@pytest.mark.parametrize("name", ["tiny_gpt", "classifier", "bert"])
def test_while_off_training_is_plain(name: str) -> None:
    whole = final_state(*fit(name, list))
    for technique in (ImportanceSampling(), ImportanceSampling(score="loss"), ImportanceSampling(threshold=math.inf)):
        assert differences(whole, final_state(*fit(name, lambda technique=technique: [technique]))) == []
        assert technique.state_dict()["steps"]["on"] == 0
    assert technique.neutral and technique.report()["tau"] == 0


def test_neutral_observes_nothing() -> None:
    net = still("classifier")
    passes: list[int] = []
    net.head.register_forward_hook(lambda *args: passes.append(1))
    fit_of = trainer(ImportanceSampling(threshold=math.inf), SelectiveBackprop(), max_steps=3)
    with pytest.raises(ValueError, match="batch of 1 sample"):  # no conflict: but the other one acts
        fit_of.fit(net, loader("classifier", 4, 1))
    passes.clear()
    trainer(ImportanceSampling(threshold=math.inf), max_steps=3).fit(net, loader("classifier"))
    assert len(passes) == 3


def test_as_many_samples_as_said_are_trained_on() -> None:
    sizes: list[tuple[int, bool]] = []

    class Sees(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sizes.append((len(batch[0]), torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

    for size, presample, b in ((8, 3.0, 3), (8, 2.5, 3), (9, 3.0, 3), (8, 1.0, 8), (8, 4.0, 2), (5, 100.0, 1)):
        sizes.clear()
        technique = ImportanceSampling(presample=presample, threshold=0.0)
        data = loader("classifier", 2 * size, size)
        trainer(technique, max_steps=2).fit(Sees(batch_norm=False), data)
        assert [n for n, trained in sizes if trained] == [b, b]
        assert technique.report() == {"tau": technique.report()["tau"], "active": 1, "fraction": b / size}
        assert f"trained on {2 * b} of {2 * size} samples" in technique.summary()


def test_draws_differ_by_step_rank_and_seed_but_not_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def indices(seed: int, rank: int) -> list[list[int]]:
        found: list[list[int]] = []
        monkeypatch.setattr(
            importance_sampling,
            "draw",
            lambda p, b, generator: found.append(draw(p, b, generator).tolist()) or draw(p, b, generator),
        )
        pl.seed_everything(seed, verbose=False)
        net = still("classifier")
        technique = ImportanceSampling(presample=1.0, threshold=0.0)
        sets = pl.Callback()
        sets.on_train_start = lambda *args: setattr(technique.session, "rank", rank)
        trainer(technique, sets, max_steps=3).fit(net, DataLoader([make_batch("classifier", 16)] * 3, batch_size=None))
        return found

    first = indices(0, 0)
    assert first == indices(0, 0)
    assert first != indices(1, 0) and first != indices(0, 1)
    assert first[0] != first[1] != first[2]


# -- losses that cannot be seen


def own_loss(net: pl.LightningModule, batch: Any) -> Tensor:
    return torch.logsumexp(net(batch[0]), dim=1) + net(batch[0])[:, 0].square()


class OwnLoss(TinyClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return own_loss(self, batch).mean()


class Unlike(TinyClassifier):
    """Ways in which a loss is not the sum of the mean-reduced calls in it."""

    how = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z, y = self(batch[0]), batch[1]
        if self.how == "scaled":
            return 0.5 * F.cross_entropy(z, y)
        if self.how == "term":
            return F.cross_entropy(z, y) + 0.01 * z.square().sum()
        if self.how == "summed":
            return F.cross_entropy(z, y, reduction="sum")
        if self.how == "metric":
            F.mse_loss(z, torch.zeros_like(z))
            return F.cross_entropy(z, y)
        return {"loss": F.cross_entropy(z, y), "extra": 1}


@pytest.mark.parametrize("threshold", [None, 0.0])
@pytest.mark.parametrize("how", ["own", "scaled", "term", "summed", "metric"])
def test_a_loss_that_cannot_be_seen_is_an_error_at_the_first_step(how: str, threshold: float | None) -> None:
    net = OwnLoss() if how == "own" else Unlike()
    net.how = how
    before = flat(net).clone()
    t = trainer(ImportanceSampling(threshold=threshold), max_steps=3)
    with pytest.raises(LossNotVisible, match=r"ImportanceSampling: training_step .*Give sample_loss=, a function"):
        t.fit(net, loader("classifier"))
    assert t.global_step == 0
    assert torch.equal(flat(net), before)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_dict_and_a_skipped_step_are_fine() -> None:
    class Skips(Unlike):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    for threshold in (None, 0.0):
        technique = ImportanceSampling(presample=2.0, threshold=threshold)
        t = trainer(technique, max_epochs=1)
        t.fit(Skips(), loader("classifier", 16))
        assert technique.state_dict()["samples"]["seen"] == 16


@pytest.mark.parametrize("told", ["seen", "unseen"])
def test_sample_loss_is_what_drawn_samples_are_trained_on(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unbiased for the mean of what it returns, with the bound at the logits, or the loss as score."""
    net, batch = still("classifier"), make_batch("classifier", B)

    def focal(net: pl.LightningModule, batch: Any) -> Tensor:
        losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return (1 - torch.exp(-losses)).square() * losses

    def positive(net: pl.LightningModule, batch: Any) -> Tensor:
        return own_loss(net, batch).square()

    fn, score = (focal, "gradient_bound") if told == "seen" else (positive, "loss")
    losses = fn(net, batch)
    if told == "seen":
        z = net(batch[0])
        pt = z.softmax(1)[torch.arange(B), batch[1]]
        # d/dz of (1 - pt)^2 (-log pt), by the chain rule through pt
        slope = 2 * (1 - pt) * torch.log(pt) - (1 - pt).square() / pt
        jacobian = pt[:, None] * (F.one_hot(batch[1], 3) - z.softmax(1))
        p = (slope[:, None] * jacobian).norm(dim=1).detach()
    else:
        p = losses.detach()
    p = p / p.sum()
    full = plain_gradient(net, lambda net: fn(net, batch).mean())
    mean = torch.zeros_like(full)
    for i in range(B):
        monkeypatch.setattr(importance_sampling, "draw", drawing(i))
        technique = ImportanceSampling(presample=B, score=score, threshold=0.0, smoothing=0.0, sample_loss=fn)
        mean += p[i] * gradient(net, batch, technique)
        assert technique.report()["tau"] == pytest.approx(math.sqrt(B * p.square().sum()), rel=1e-4)
    torch.testing.assert_close(mean, full, rtol=2e-4, atol=2e-6)


def test_sample_loss_while_off_trains_plainly() -> None:
    def told(net: pl.LightningModule, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    whole = final_state(*fit("classifier", list))
    technique = ImportanceSampling(sample_loss=told)
    assert differences(whole, final_state(*fit("classifier", lambda: [technique]))) == []
    assert technique.report()["tau"] > 0


@pytest.mark.parametrize(
    ("fn", "score", "message"),
    [
        (
            lambda net, batch: own_loss(net, batch).mean(),
            "loss",
            r"returned shape \(\); expected a tensor of shape \(4,\)",
        ),
        (lambda net, batch: own_loss(net, batch)[:2], "loss", r"returned shape \(2,\); expected a tensor of shape"),
        (lambda net, batch: own_loss(net, batch).tolist(), "loss", r"returned list; expected a tensor of shape \(4,\)"),
        (own_loss, "gradient_bound", r"sample_loss called none of .*Use score='loss'"),
        (
            lambda net, batch: -own_loss(net, batch).abs(),
            "loss",
            r"sample\(s\) 0, 1, 2, 3 of 4 is negative.*gradient_bound",
        ),
    ],
)
def test_a_sample_loss_that_does_not_do(fn: Any, score: Any, message: str) -> None:
    t = trainer(ImportanceSampling(score=score, sample_loss=fn), max_steps=2)
    with pytest.raises(ValueError, match="ImportanceSampling.*" + message):
        t.fit(OwnLoss(), loader("classifier"))
    assert t.global_step == 0


# -- whose loss is whose


class Layout(TinyGPT):
    """Ways of laying out the tokens of a batch in the loss."""

    how = ""

    def __init__(self) -> None:
        super().__init__(num_layers=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, y = batch["input_ids"], batch["labels"]
        if self.how == "random_masks":  # as a masked language model that masks in its step
            masked = torch.rand(ids.shape) < 0.3
            ids, y = ids.masked_fill(masked, 0), y.masked_fill(~masked, -100)
        if self.how == "random_lengths":  # draws of one sample move those of the next
            y = y.clone()
            for i in range(len(y)):
                n = int(torch.rand(int(ids[i, 0]) + 1).sum()) % 6
                y[i, :n] = -100
        if self.how == "trimmed":  # as many tokens as the longest sample has
            keep = int((y != -100).any(0).nonzero().max()) + 1
            ids, y = ids[:, :keep], y[:, :keep]
        z = self(ids)
        if self.how == "time_first":
            return F.cross_entropy(z.transpose(0, 1).flatten(0, 1), y.transpose(0, 1).flatten())
        if self.how == "picked":  # the tokens that count, however many each sample has
            count = y != -100
            return F.cross_entropy(z[count], y[count])
        if self.how == "contrastive":  # each sample against the others
            a = F.normalize(z.mean(1), dim=1)
            return F.cross_entropy(20 * a @ a.T, torch.arange(len(a)))
        if self.how == "channels":
            return F.cross_entropy(z.transpose(1, 2), y)
        return F.cross_entropy(z.flatten(0, 1), y.flatten())


def token_batch(how: str, size: int, length: int) -> Any:
    batch = dict(make_batch("tiny_gpt", size, length=length))
    if how in ("picked", "trimmed"):
        labels = batch["labels"].clone()
        for i in range(size):  # as many as divide evenly, so that nothing else tells
            labels[i, length - 2 - 2 * i :] = -100
        batch["labels"] = labels
    return batch


@pytest.mark.parametrize("technique", [ImportanceSampling, SelectiveBackprop])
@pytest.mark.parametrize(("size", "length"), [(4, 12), (4, 11), (5, 12), (2, 12)])
@pytest.mark.parametrize("how", ["time_first", "picked", "contrastive"])
def test_losses_that_do_not_lie_sample_by_sample(how: str, size: int, length: int, technique: Any) -> None:
    net = Layout()
    net.how = how
    t = trainer(technique(), max_steps=2)
    with pytest.raises(LossNotVisible, match=r"are not in the order of the samples.*batch first.*|do not split evenly"):
        t.fit(net, DataLoader([token_batch(how, size, length)] * 2, batch_size=None))
    assert t.global_step == 0


@pytest.mark.parametrize("how", ["", "time_first"])
@pytest.mark.parametrize("evaluation", ["fails", "has no loss"])
def test_a_step_that_cannot_run_in_evaluation_mode(evaluation: str, how: str) -> None:
    """It is looked at with dropout and batch statistics alone in evaluation mode."""

    class TrainsOnly(Layout):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not self.training:
                assert evaluation != "fails", "planted"
                return self(batch["input_ids"]).sum()
            return super().training_step(batch, batch_idx)

    net = TrainsOnly()
    net.how = how
    t = trainer(ImportanceSampling(), max_steps=2)
    data = DataLoader([token_batch(how, 4, 12)] * 2, batch_size=None)
    if how:
        with pytest.raises(LossNotVisible, match="are not in the order of the samples"):
            t.fit(net, data)
    else:
        t.fit(net, data)
    assert all(m.training for m in net.modules())


@pytest.mark.parametrize("technique", [ImportanceSampling, SelectiveBackprop])
@pytest.mark.parametrize(("size", "length"), [(4, 12), (5, 11), (2, 12)])
@pytest.mark.parametrize("how", ["", "random_masks", "random_lengths", "trimmed", "channels"])
def test_losses_that_do(how: str, size: int, length: int, technique: Any) -> None:
    net = Layout()
    net.how = how
    t = trainer(technique(), max_steps=2)
    t.fit(net, DataLoader([token_batch(how, size, length)] * 2, batch_size=None))
    assert t.global_step == 2
    assert all(m.training for m in net.modules())


def test_samples_that_another_technique_mixes_are_no_matter_of_layout() -> None:
    class Mixes(Nop):
        def attach(self, session: Any) -> None:
            mixed = lambda batch: (batch[0] + batch[0].flip(0), batch[1])  # noqa: E731
            session.chain.add(Stage.TRANSFORM, lambda step, batch, proceed: proceed(mixed(batch)))

    t = trainer(ImportanceSampling(presample=2.0, threshold=0.0), Mixes(), max_steps=2)
    t.fit(still("classifier"), loader("classifier"))
    assert t.global_step == 2


# -- bad input


@pytest.mark.parametrize("threshold", [None, 0.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error(value: float, threshold: float | None) -> None:
    class Breaks(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self(batch[0])
            if self.global_step == 2:
                z = z * torch.tensor([1.0, value, 1.0, 1.0])[:, None]
            return F.mse_loss(z, torch.zeros_like(z))

    t = trainer(ImportanceSampling(presample=1.0, threshold=threshold), max_steps=5)
    with pytest.raises(
        ValueError, match=r"ImportanceSampling: .* sample\(s\) 1 of the 4 in batch 2 .*after 2 steps.* NaN"
    ):
        t.fit(Breaks(batch_norm=False), loader("classifier"))
    assert t.global_step == 2


def test_one_rank_s_problem_is_raised_on_all() -> None:
    class TwoRanks:
        def __init__(self, other: Any) -> None:
            self.other, self.replicas = other, self

        def everyone(self, value: Any) -> list[Any]:
            return [value, self.other]

        def of_replicas(self, every: list[Any]) -> list[Any]:
            return every

    assert agree(TwoRanks((None, 5)), None, 4) == [4, 5]
    with pytest.raises(ValueError, match=r"^Rank 1: theirs$") as caught:
        agree(TwoRanks(((False, "theirs"), None)), None, 4)
    assert not isinstance(caught.value, LossNotVisible)
    with pytest.raises(LossNotVisible, match=r"^Rank 0: ours Rank 1: theirs$"):
        agree(TwoRanks(((False, "theirs"), None)), LossNotVisible("ours"))


def test_tau_and_threshold_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = ImportanceSampling(smoothing=0.0)
    t = trainer(technique, max_steps=2)
    taus = Taus(technique)
    t.callbacks.append(taus)
    x, y = make_batch("classifier", 6)
    own: list[Any] = []

    def both(self: Any, value: Any) -> list[Any]:
        if not isinstance(value, tuple) or not isinstance(value[1], tuple):  # something else than a tau and a threshold
            return [value]
        own.append(value[1])
        return [value, (None, (3.2, 2.2))]

    monkeypatch.setattr(Replicas, "everyone", both)
    monkeypatch.setattr(Replicas, "of_replicas", lambda self, every: every)
    t.fit(still("classifier"), DataLoader([(x, y)] * 2, batch_size=None))
    mean = (own[0][0] + 3.2) / 2
    assert own[0][1] == 2 and 2 < mean < 2.2, "between the thresholds of the two"
    assert taus.found[0] == pytest.approx(mean)
    assert taus.active == [0, 0], "the larger threshold counts on both"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"presample": 0.5}, r"presample=0.5\): expected a finite number >= 1"),
        ({"presample": math.inf}, r"presample=inf\): expected a finite number >= 1"),
        ({"presample": math.nan}, r"presample=nan\): expected"),
        ({"score": "norm"}, r"score='norm'\): expected 'gradient_bound' or 'loss'"),
        ({"threshold": -1.0}, r"threshold=-1.0\): expected a number >= 0 or math.inf, or None: .*math.inf never"),
        ({"threshold": math.nan}, r"threshold=nan\)"),
        ({"smoothing": 1.0}, r"smoothing=1.0\): expected a number in \[0, 1\)"),
        ({"smoothing": -0.1}, r"smoothing=-0.1\)"),
        ({"sample_loss": "mine"}, r"sample_loss='mine'\): expected a function of \(module, batch\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"ImportanceSampling\(" + message):
        ImportanceSampling(**arguments)


def test_nothing_to_choose_from() -> None:
    t = trainer(ImportanceSampling(), max_steps=2)
    with pytest.raises(ValueError, match=r"ImportanceSampling: got a batch of 1 sample; expected several.*batch_size"):
        t.fit(TinyGPT(num_layers=1), loader("tiny_gpt", 4, 1))


def test_refuses_the_other_that_chooses() -> None:
    t = trainer(ImportanceSampling(), SelectiveBackprop(), max_steps=2)
    with pytest.raises(ValueError, match="ImportanceSampling and SelectiveBackprop cannot train together: both choose"):
        t.fit(TinyClassifier(), loader("classifier"))
