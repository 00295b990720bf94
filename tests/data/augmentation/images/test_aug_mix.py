"""AugMix: mixtures by hand, weights and strengths as drawn, and the loss with its consistency, written out."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

import lightning_eff as eff
from lightning_eff._core.batches import join
from lightning_eff.data.augmentation.images import aug_mix as home
from lightning_eff.data.augmentation.images._operations import OPERATIONS
from lightning_eff.data.augmentation.images.aug_mix import PAPERS, aug_mix, draw_chains, jensen_shannon
from tests.cases import Case
from tests.data.augmentation.modules import (
    CLASSES,
    ON_IMAGES,
    SIZE,
    WEIGHTS,
    Own,
    ResNet,
    batches,
    chi_squared,
    codes,
    conv_next,
    train,
    vit,
)
from tests.models import flat
from tests.runs import fit_yaml, resume_from_every_step

pytest.importorskip("kornia")
_RANGE: Any = {"mean": 0.5, "std": 0.1}  # of numbers drawn from a normal distribution

CASES = {
    "AugMix": Case(
        active=lambda: eff.AugMix(**_RANGE),
        neutral=lambda: eff.AugMix(until=0.0),
        **ON_IMAGES,
    )
}


def images(channels: int = 3, size: int = 6) -> Tensor:
    return torch.rand(size, channels, 8, 9, generator=torch.Generator().manual_seed(0))


def drawn(count: int, names: Any = PAPERS, seed: int = 0, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {"width": 3, "depth": None, "severity": 3.0, "alpha": 1.0, **kwargs}
    return draw_chains(count, names=names, generator=torch.Generator().manual_seed(seed), **settings)


def test_chains_of_identity_leave_images_bit_for_bit() -> None:
    x = images()
    assert torch.equal(aug_mix(x, drawn(len(x), ("identity",)), ("identity",), 0.5), x)


def test_mixtures_are_those_written_out() -> None:
    x = images()
    chains = drawn(len(x))
    made = aug_mix(x, chains, PAPERS, 0.5)
    for i, own in enumerate(x):
        mixture = torch.zeros_like(own)
        for k in range(3):
            p = own[None]
            for which, strength in zip(chains.which[i, k], chains.strength[i, k], strict=True):
                if which >= 0:
                    p = OPERATIONS[PAPERS[int(which)]].apply(p, strength[None], 0.5).clamp(0, 1)
            mixture += float(chains.w[i, k]) * p[0]
        m = float(chains.m[i])
        torch.testing.assert_close(made[i], m * own + (1 - m) * mixture, rtol=0, atol=1e-5)


def test_draws_are_of_the_papers_distributions() -> None:
    n = 4000
    chains = drawn(n)
    assert chains.w.shape == (n, 3) and torch.allclose(chains.w.sum(1), torch.ones(n, dtype=torch.float64))
    assert stats.kstest(chains.w[:, 0].numpy(), stats.beta(1, 2).cdf).pvalue > 1e-4, "a marginal of Dirichlet(1, 1, 1)"
    assert stats.kstest(chains.m.numpy(), stats.beta(1, 1).cdf).pvalue > 1e-4
    depths = (chains.which >= 0).sum(2).flatten()
    assert chi_squared(torch.bincount(depths, minlength=4)[1:].double(), torch.full((3,), n)) < 4
    done = chains.which[chains.which >= 0]
    assert chi_squared(torch.bincount(done).double(), torch.full((9,), len(done) / 9)) < 4
    for place, name in enumerate(PAPERS):
        strength = chains.strength[chains.which == place].abs()
        level = 10 * {"posterize": strength - 1}.get(name, strength) * (3 * 150 / 331 if "translate" in name else 1)
        assert stats.kstest(level.numpy(), stats.uniform(0.1, 2.9).cdf).pvalue > 1e-4, name
    assert drawn(5, depth=2).which.shape == (5, 3, 2) and bool((drawn(5, depth=2).which >= 0).all())
    assert abs(float(drawn(n, alpha=5.0).m.var()) - 1 / 44) < 0.003


def test_divergence_lies_between_0_and_log_3() -> None:
    g = torch.Generator().manual_seed(0)
    p, q, r = (torch.randn(200, 5, generator=g, dtype=torch.float64).mul(3).log_softmax(-1) for _ in range(3))
    found = jensen_shannon(p, q, r)
    assert float(found.min()) > 0 and float(found.max()) < math.log(3)
    mean = (p.exp() + q.exp() + r.exp()) / 3
    by_scipy = sum(torch.from_numpy(stats.entropy(one.exp().numpy(), mean.numpy(), axis=1)) for one in (p, q, r)) / 3
    torch.testing.assert_close(found, by_scipy)
    assert float(jensen_shannon(p, p, p).abs().max()) < 1e-12
    apart = torch.eye(3, dtype=torch.float64).log().clamp(min=-200)
    assert float(jensen_shannon(*apart)) == pytest.approx(math.log(3))
    never = torch.eye(3).log().requires_grad_()  # chances of 0
    found = jensen_shannon(never, never, never).sum()
    found.backward()
    assert float(found.detach()) == 0 and never.grad is not None and bool(never.grad.isfinite().all())


# -- consistency in the loss


def _consistent(**kwargs: Any) -> Any:
    return eff.AugMix(consistency=12.0, severity=9.0, **_RANGE, **kwargs)


@pytest.mark.parametrize(
    ("loss", "labelled"),
    [
        (F.cross_entropy, None),
        (lambda z, y: F.nll_loss(z.log_softmax(-1), y), None),
        (lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS), None),
        (F.cross_entropy, lambda y: y.where(y != 2, -100)),
        (lambda z, y: F.cross_entropy(z, y, reduction="sum"), None),
        (F.cross_entropy, lambda y: codes(y) * 0.8 + 0.05),
    ],
    ids=["cross-entropy", "nll", "weights", "ignored", "sum", "probabilities"],
)
def test_the_loss_is_that_on_plain_images_and_12_times_the_divergence(loss: Any, labelled: Any) -> None:
    x, y = batches()[0]
    y = y if labelled is None else labelled(y)
    net = Own(loss)
    for p in net.parameters():
        p.data.mul_(8.0)  # views apart enough: of near ones the divergence is a difference that rounding makes
    twin = copy.deepcopy(net)
    technique = _consistent()
    train(net, technique, data=[(x, y)])
    given, labels = net.given[-1]
    assert torch.equal(given[:SIZE], x) and torch.equal(labels, torch.cat([y, y, y]))
    one, two = given[SIZE : 2 * SIZE], given[2 * SIZE :]
    assert not torch.equal(one, two) and not torch.equal(one, x)
    logs = [twin(t).log_softmax(-1) for t in (x, one, two)]
    mean = torch.stack([log.exp() for log in logs]).mean(0).log()
    rows = sum(F.kl_div(mean, log, reduction="none", log_target=True).sum(-1) for log in logs) / 3
    rows = rows[y >= 0] if y.ndim == 1 else rows
    js = rows.sum() if loss(torch.zeros(2, 4), torch.tensor([0, 0])) > 2 else rows.mean()
    expected = loss(twin(x), y) + 12 * js
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)
    assert rows.mean().item() > 1e-3
    assert technique.report()["divergence"] == pytest.approx(rows.mean().item(), rel=1e-4)
    expected.backward()
    stepped = [p - 0.1 * p.grad for p in twin.parameters() if p.grad is not None]
    torch.testing.assert_close([*net.parameters()], stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [ResNet, vit, conv_next], ids=["resnet", "vit", "convnext"])
def test_modules_train_with_it(build: Any) -> None:
    net = train(build(), technique := _consistent(), data=batches(2))
    assert len(net.given[-1][0]) == 3 * SIZE and technique.report()["divergence"] > 0


def test_evaluation_and_the_end_of_the_budget_are_plain() -> None:
    data = batches(4)
    net = train(
        ResNet(), _consistent(until=0.5), data=data, limit_val_batches=4, val_check_interval=4, precision="bf16-mixed"
    )
    assert [len(x) for x, _ in net.given[-4:]] == [18, 18, 6, 6] and [len(x) for x, _ in net.evaluated] == [6] * 4


def test_smoothing_mixing_and_selection_beside_it_act_on_plain_images() -> None:
    x, y = batches()[0]
    net = Own(F.cross_entropy)
    twin = copy.deepcopy(net)
    smoothing, technique = eff.LabelSmoothing(epsilon=0.2), _consistent()
    train(net, smoothing, technique, data=[(x, y)])
    js = float(technique.report()["divergence"])
    expected = F.cross_entropy(twin(x), y, label_smoothing=0.2).item() + 12 * js
    assert net.losses[-1] == pytest.approx(expected, rel=1e-5)
    mixed = train(Own(F.cross_entropy), _consistent(), eff.Mixup(alpha=1.0), data=[(x, y)])
    assert len(mixed.given[-1][0]) == 3 * SIZE and not torch.equal(mixed.given[-1][0][:SIZE], x)
    chosen = train(Own(F.cross_entropy), _consistent(), eff.SelectiveBackprop(keep=0.5), data=[(x, y)])
    assert len(chosen.given[-1][0]) == 9


def test_two_passes_see_the_same_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def spy(versions: Any) -> Any:
        made.append(join(versions))
        return made[-1]

    monkeypatch.setattr(home, "join", spy)
    train(Own(F.cross_entropy), _consistent(), eff.SharpnessAwareMinimization(), data=batches())
    first, second = (x for x, _ in made)
    assert torch.equal(first, second) and len(first) == 3 * SIZE


@pytest.mark.slow
def test_it_resumes_from_every_step(tmp_path: Path) -> None:
    assert resume_from_every_step("vit", lambda: [_consistent()], tmp_path) == {}


class Metric(ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        self.accuracy(z, y)
        return F.cross_entropy(z, y)


def test_a_metric_of_training_batches_is_told_once() -> None:
    with pytest.warns(UserWarning, match="AugMix: training_step compares the labels") as told:
        train(Metric(), _consistent(), data=batches(3))
    assert sum("compares the labels" in str(one.message) for one in told) == 1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda z, y: F.binary_cross_entropy_with_logits(z, codes(y)), "calls F.binary_cross_entropy_with_logits"),
        (lambda z, y: F.cross_entropy(z, y, reduction="none").sum(), "reduction='none'"),
        (lambda z, y: z.logsumexp(-1).mean(), "no loss call of training_step was seen"),
    ],
)
def test_other_losses_are_refused_before_any_weight_changes(loss: Any, message: str) -> None:
    net = Own(loss)
    before = flat(net)
    with pytest.raises(ValueError, match=rf"^AugMix(?s:.*){message}"):
        train(net, _consistent())
    assert torch.equal(flat(net), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, r"width=0\): expected an integer >= 1"),
        ({"depth": 1.5}, r"depth=1.5\): expected an integer >= 1"),
        ({"severity": 0}, r"severity=0\): expected a number in \(0, 10\]"),
        ({"alpha": -1}, r"alpha=-1\): expected a finite number > 0"),
        ({"consistency": -1}, r"consistency=-1\): expected a finite number"),
        ({"operations": ["blur"]}, r"operations=\['blur'\]\): expected a list of some of 'identity'"),
        ({"labels": "y"}, r"labels='y'\): expected a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^AugMix\({message}"):
        eff.AugMix(**arguments)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "AugMix", {"consistency": 12.0, "mean": 0.5, "std": 0.1}, max_steps=4, **names)
