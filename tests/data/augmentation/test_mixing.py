"""The engine of mixtures: exact losses of every kind, what is refused, what is told, and who else sees the mixtures."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_eff as eff
from lightning_eff._core.losses import LossNotVisible
from lightning_eff.data.selection import selective_backprop
from tests.data.augmentation.modules import (
    CLASSES,
    LOSSES,
    SIDE,
    SIZE,
    WEIGHTS,
    Ids,
    Own,
    ResNet,
    Spied,
    batches,
    check_exact,
    conv_next,
    train,
    vit,
)

BOTH = [eff.Mixup, eff.CutMix]
mixers = pytest.mark.parametrize("cls", BOTH)


def busy(cls: Any, **kwargs: Any) -> Any:
    """Mixes a good part of each sample."""
    return cls(alpha=8.0, per_sample=True, **kwargs)


# -- one pass, and the loss on the mixed targets


@mixers
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_on_mixed_targets(name: str, cls: Any) -> None:
    loss, soft = LOSSES[name]
    check_exact(Own(loss), busy(cls), soft)


@mixers
@pytest.mark.parametrize("build", [ResNet, vit, conv_next], ids=["resnet", "vit", "convnext"])
def test_modules_with_integer_labels(build: Any, cls: Any) -> None:
    check_exact(build(), busy(cls), LOSSES["cross-entropy"][1])


@mixers
def test_class_weights_and_ignored_labels_divide_each_loss_by_its_own(cls: Any) -> None:
    """``lambda L(y) + (1 - lambda) L(y')``, each with the mean that it would have as a call of its own."""
    x, y = batches()[0]
    y[2] = -100
    technique = busy(cls)
    spied = Spied(technique)
    net = train(Own(lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS)), technique, data=[(x, y)])
    share, other = spied.shares[0], y[spied.partners[0]]
    twin = Own(F.cross_entropy)
    z = twin(net.given[-1][0])

    def mean(of: Tensor, share: Tensor) -> Tensor:
        rows = F.cross_entropy(z, of, weight=WEIGHTS, reduction="none")
        return (share * rows).sum() / WEIGHTS[of[of >= 0]].sum()

    expected = mean(y, share) + mean(other, 1 - share)
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


@mixers
def test_labels_that_are_probabilities_are_mixed(cls: Any) -> None:
    x = batches()[0][0]
    p = torch.rand(SIZE, CLASSES, generator=torch.Generator().manual_seed(3)).softmax(-1)
    technique = busy(cls)
    spied = Spied(technique)
    net = train(Own(F.cross_entropy), technique, data=[(x, p)])
    share = spied.shares[0][:, None]
    soft = share * p + (1 - share) * p[spied.partners[0]]
    expected = LOSSES["cross-entropy"][1](Own(F.cross_entropy)(net.given[-1][0]), soft)
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


# -- draws


@mixers
def test_draws_follow_from_seed_step_micro_batch_and_rank(cls: Any) -> None:
    def images(seed: int = 0, **kwargs: Any) -> list[Tensor]:
        net = ResNet()
        pl.seed_everything(seed, verbose=False)
        train(net, busy(cls), data=[batches()[0]] * 4, **kwargs)
        return [x for x, _ in net.given]

    first = images()
    assert all(torch.equal(a, b) for a, b in zip(first, images(), strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(first, images(seed=5), strict=True))
    assert not any(torch.equal(first[0], other) for other in first[1:])
    windows = images(accumulate_grad_batches=2, max_steps=2)
    assert not torch.equal(windows[0], windows[1]), "micro-batches of one step draw apart"

    class Rank(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.callbacks[0].session.rank = 1

    pl.seed_everything(0, verbose=False)
    net = train(ResNet(), busy(cls), Rank(), data=[batches()[0]] * 4)
    assert not torch.equal(net.given[-1][0], first[-1])


@mixers
def test_as_often_as_prob_says_and_until(cls: Any) -> None:
    data = batches(200)
    technique = busy(cls, prob=0.3, until=0.5)
    net = train(ResNet(), technique, data=data)
    mixed = torch.tensor([not torch.equal(x, own) for (x, _), (own, _) in zip(net.given, data, strict=True)])
    assert not mixed[100:].any()
    assert abs(int(mixed[:100].sum()) - 30) < 4 * (100 * 0.3 * 0.7) ** 0.5
    assert technique.report()["share"] == 0 and f"changed {int(mixed.sum())} of 200 batches" in technique.summary()


@mixers
def test_evaluation_is_not_mixed(cls: Any) -> None:
    data = batches(4)
    net = train(ResNet(), busy(cls), data=data, limit_val_batches=4, val_check_interval=4)
    assert len(net.evaluated) == 4
    assert all(torch.equal(x, own) for (x, _), (own, _) in zip(net.evaluated, data, strict=True))


def test_of_more_that_mix_than_an_epoch_has_batches_each_has_its_turn() -> None:
    both = {"encoder": torch.nn.Identity(), "decoder": torch.nn.Identity(), "prob": 1.0}
    several = [eff.Mixup(), eff.CutMix(), eff.SaliencyMix(), eff.ManifoldMixup(), eff.TransMix(), eff.StyleMix(**both)]
    several.append(eff.TokenMix(teacher="uniform", block=2))
    spied = [Spied(technique) for technique in several]
    train(vit(), *several, data=batches(3), max_steps=7)
    assert [len(one.shares) for one in spied] == [1] * 7


def test_of_several_that_mix_each_batch_goes_to_one() -> None:
    spied = [Spied(mixup := busy(eff.Mixup)), Spied(cut_mix := busy(eff.CutMix))]
    count = 40
    for order in ((mixup, cut_mix), (cut_mix, mixup)):
        whose: list[tuple[int, int]] = []

        class Count(pl.Callback):
            def __init__(self, whose: list[tuple[int, int]]) -> None:
                self.whose = whose

            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                self.whose.append((len(spied[0].shares), len(spied[1].shares)))

        before = (len(spied[0].shares), len(spied[1].shares))
        pl.seed_everything(0, verbose=False)
        train(ResNet(), *order, Count(whose), data=batches(count))
        assert all(sum(after) - sum(before) == k for k, after in enumerate(whose, 1)), "each batch once"
        firsts = [whose[k][0] - ([before, *whose][k][0]) for k in range(count)]
        assert all(firsts[k] + firsts[k + 1] == 1 for k in range(0, count, 2)), "of two batches, one each"
        assert 0 < sum(firsts[::2]) < count // 2
    half = len(spied[0].shares) // 2
    assert all(torch.equal(a, b) for a, b in zip(spied[0].shares[:half], spied[0].shares[half:], strict=True))


# -- others that look at samples


@mixers
@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_what_chooses_samples_scores_the_mixtures_that_it_trains_on(
    cls: Any, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[Tensor] = []
    probabilities = selective_backprop.keep_probabilities

    def spy(losses: Tensor, history: Tensor, *, beta: float) -> Tensor:
        scored.append(losses)
        return probabilities(losses, history, beta=beta)

    monkeypatch.setattr(selective_backprop, "keep_probabilities", spy)
    technique = busy(cls)
    spied = Spied(technique)
    net = train(Own(F.cross_entropy), technique, eff.SelectiveBackprop(keep=keep))
    x, y = batches()[0]
    twin = Own(F.cross_entropy)
    share = spied.shares[0]
    trained = net.given[-1][0]
    assert len(trained) == round(keep * SIZE) and len(scored) == 1
    again, _ = _mixed_again(cls, x, y)
    rows = -(spied.targets(0, y) * twin(again).log_softmax(-1)).sum(-1)
    assert float(share.min()) < 1
    torch.testing.assert_close(scored[0].float(), rows.detach(), rtol=1e-5, atol=1e-6)
    chosen = [int((again == one).flatten(1).all(1).nonzero()) for one in trained]
    assert net.losses[-1] == pytest.approx(rows[chosen].mean().item(), rel=1e-5)


def _mixed_again(cls: Any, x: Tensor, y: Tensor) -> Any:
    """The mixtures that a run of the technique alone makes of the batch: the same, as draws are keyed."""
    pl.seed_everything(0, verbose=False)
    return train(Own(F.cross_entropy), busy(cls), data=[(x, y)]).given[-1]


@mixers
def test_importance_sampling_weighs_mixtures_to_the_mean_of_all(cls: Any) -> None:
    """All of a batch, drawn with equal chances: the loss is that of a run without it on average."""
    losses = []
    for k in range(60):
        both, alone = Own(F.cross_entropy), Own(F.cross_entropy)
        pl.seed_everything(k, verbose=False)
        train(both, busy(cls), eff.ImportanceSampling(presample=2.0, threshold=0.5))
        pl.seed_everything(k, verbose=False)
        train(alone, busy(cls))
        losses.append(both.losses[-1] - alone.losses[-1])
    values = torch.tensor(losses)
    assert abs(float(values.mean())) < 4 * float(values.std()) / len(values) ** 0.5


# -- what is told and refused


class Metrics(ResNet):
    """Computes an accuracy of training batches."""

    def __init__(self, metric: bool = True) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES) if metric else None

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        if self.accuracy is None:
            self.log("accuracy", (z.argmax(-1) == y).float().mean())
        else:
            self.accuracy(z, y)
        return F.cross_entropy(z, y)


@mixers
@pytest.mark.parametrize("metric", [True, False])
def test_a_metric_of_training_batches_is_told_once(cls: Any, metric: bool) -> None:
    with pytest.warns(UserWarning, match=f"{cls.__name__}: training_step compares the labels") as told:
        train(Metrics(metric), busy(cls), data=batches(4))
    assert sum("compares the labels" in str(one.message) for one in told) == 1


@mixers
def test_no_metric_is_told_where_there_is_none(cls: Any, recwarn: pytest.WarningsRecorder) -> None:
    train(Own(lambda z, y: F.cross_entropy(z[y != 9], y[y != 9])), busy(cls), data=batches(2))
    assert not [one for one in recwarn if "compares the labels" in str(one.message)]


def _by_hand(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(1, y[:, None]).mean()


_IMAGES = torch.zeros(SIZE, 1, SIDE, SIDE)


@mixers
@pytest.mark.parametrize(
    ("net", "batch", "message"),
    [
        (lambda: Own(_by_hand), None, "no loss call of training_step was seen"),
        (
            lambda: Own(lambda z, y: _by_hand(z, y) + F.cross_entropy(z, y)),
            None,
            r"come into the loss by torch's 'gather'",
        ),
        (
            lambda: Own(lambda z, y: F.mse_loss(z[:, 0], y)),
            (_IMAGES, torch.rand(SIZE)),
            "targets of F.mse_loss, so they are no classes",
        ),
        (lambda: Own(F.cross_entropy), (_IMAGES.byte(), torch.zeros(SIZE).long()), "are uint8, so|no other tensor"),
        (
            lambda: Ids(),
            {"input_ids": torch.ones(4, 5).long(), "labels": torch.arange(4)},
            r"no images .*input_ids.* int64",
        ),
        (
            lambda: Own(F.cross_entropy),
            (_IMAGES, torch.rand(SIZE, CLASSES) + 3),
            "no classes: they are neither integers nor",
        ),
        (
            lambda: Own(lambda z, y: F.cross_entropy(z, y[:, 0])),
            (_IMAGES, torch.zeros(SIZE, 1).long(), torch.zeros(2, 1, SIDE, SIDE)),
            "differ in",
        ),
    ],
    ids=["by hand", "beside", "regression", "uint8", "tokens", "no probabilities", "two batches"],
)
def test_what_cannot_be_mixed_is_refused_before_any_weight_changes(
    cls: Any, net: Any, batch: Any, message: str
) -> None:
    built = net()
    before = [p.clone() for p in built.parameters()]
    if isinstance(batch, tuple) and batch[0].dtype == torch.uint8:
        built.forward = lambda images: built.head(built.body(images.float()).mean((2, 3)))
    with pytest.raises(ValueError, match=rf"^{cls.__name__}: (?s:.*)({message})") as raised:
        train(built, busy(cls), data=[batches()[0] if batch is None else batch])
    assert isinstance(raised.value, LossNotVisible) == (
        "loss call" in str(raised.value) or "outside of" in str(raised.value)
    )
    assert all(torch.equal(p, q) for p, q in zip(built.parameters(), before, strict=True))


class Dense(ResNet):
    """Labels each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(8, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.map(self.body(images))


def test_labels_of_pixels_are_mixed_by_shares_and_not_by_areas() -> None:
    data = [(x, torch.zeros(SIZE, SIDE, SIDE).long()) for x, _ in batches(2)]
    train(Dense(), busy(eff.Mixup), data=data)
    with pytest.raises(ValueError, match=r"CutMix: the labels \[1\] \(6, 8, 8\) int64 are several per sample"):
        train(Dense(), busy(eff.CutMix), data=data)


@mixers
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -1}, r"alpha=-1\): expected a finite number >=? 0"),
        ({"alpha": float("inf")}, r"alpha=inf\): expected a finite"),
        ({"prob": 1.5}, r"prob=1.5\): expected a number in \[0, 1\]"),
        ({"until": True}, r"until=True\): expected a number in \[0, 1\]"),
        ({"keys": "image"}, r"keys='image'\): expected a list"),
        ({"labels": []}, r"labels=\[\]\): expected a list"),
    ],
)
def test_bad_arguments(cls: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{cls.__name__}\({message}"):
        cls(**arguments)


@mixers
def test_until_needs_an_end_of_the_run(cls: Any) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__}\(until=0.5\): the Trainer has no end"):
        train(ResNet(), cls(until=0.5), max_steps=-1, max_epochs=-1)


@mixers
def test_a_batch_of_one_is_left_alone(cls: Any) -> None:
    data = [(x[:1], y[:1]) for x, y in batches(3)]
    net = train(Own(F.cross_entropy), busy(cls), data=data)
    assert all(torch.equal(x, own) for (x, _), (own, _) in zip(net.given, data, strict=True))
