"""Ordered SGD: the gradient of the order-weighted losses on average, the paper's schedule, and its errors."""

from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff._core.losses import LossNotVisible
from lightning_eff.data.selection._accuracy import CountRight
from lightning_eff.data.selection._choosing import largest
from lightning_eff.data.selection.ordered_sgd import OrderedSGD, share_at
from tests.cases import Case, own_loss
from tests.data.selection.test_selective_backprop import Gradients, gradient, rows_of, sample_means, still
from tests.models import TinyClassifier, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "OrderedSGD": Case(
        active=lambda: OrderedSGD(keep=0.5),
        neutral=lambda: OrderedSGD(keep=1.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}


def order_weights(n: int, s: int, q: int) -> list[float]:
    """Compute ``gamma_j``, the probability that the j-th largest of ``n`` losses is among the ``q`` largest of ``s`` drawn.

    ``gamma_j = sum_{l<q} C(j-1, l) C(n-j, s-l-1) / C(n, s)`` for ``j = 1 ... n``, which sum to ``q``. Averaged over batches of
    ``s`` samples, the update is the gradient of ``(1/q) sum_j gamma_j L_(j)``.
    """
    every = comb(n, s)
    return [sum(comb(j - 1, k) * comb(n - j, s - k - 1) for k in range(q)) / every for j in range(1, n + 1)]


@pytest.mark.parametrize(("n", "s", "q"), [(6, 3, 2), (5, 5, 2), (7, 4, 4), (4, 1, 1)])
def test_order_weights_are_how_often_each_is_chosen(n: int, s: int, q: int) -> None:
    counts = [0] * n
    for drawn in combinations(range(n), s):  # in descending order of their losses
        for j in drawn[:q]:
            counts[j] += 1
    assert order_weights(n, s, q) == pytest.approx([c / comb(n, s) for c in counts], abs=1e-12)
    assert sum(order_weights(n, s, q)) == pytest.approx(q)
    if q == s:  # plain SGD: all count alike
        assert order_weights(n, s, q) == pytest.approx([s / n] * n)


def test_the_mean_step_is_the_gradient_of_the_order_weighted_losses() -> None:
    """Over every batch of s of n samples: ``grad (1/q) sum_j gamma_j L_(j)``."""
    n, s, q = 6, 3, 2
    net = still("classifier")
    net.lr = 0.0
    data = make_batch("classifier", n)
    batches = [rows_of(data, [*drawn]) for drawn in combinations(range(n), s)]
    gradients = Gradients()
    trainer(OrderedSGD(keep=q / s), gradients, max_steps=len(batches)).fit(net, DataLoader(batches, batch_size=None))
    losses = F.cross_entropy(net(data[0]), data[1], reduction="none")
    ordered = losses.sort(descending=True).values
    expected = torch.autograd.grad((torch.tensor(order_weights(n, s, q)) * ordered).sum() / q, [*net.parameters()])
    assert len(gradients.found) == comb(n, s)
    torch.testing.assert_close(
        torch.stack(gradients.found).mean(0), torch.cat([g.flatten() for g in expected]), rtol=1e-5, atol=1e-7
    )


class ResNet(TinyClassifier):
    """Residual convolutions on the features, and a sigmoid loss for each class."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch[0]), F.one_hot(batch[1], 3).float())


@pytest.mark.parametrize("name", ["tiny_gpt", "classifier", "gpt2", "bert", "vit", "resnet"])
def test_the_plain_gradient_on_the_hardest(name: str) -> None:
    batch = make_batch("classifier" if name == "resnet" else name, 6, length=12)
    net = ResNet() if name == "resnet" else still(name)
    if name == "resnet":
        with torch.no_grad():
            target = F.one_hot(batch[1], 3).float()
            means = F.binary_cross_entropy_with_logits(net(batch[0]), target, reduction="none").mean(1).tolist()
    else:
        means = sample_means(net, name, batch)
    hardest = sorted(sorted(range(6), key=lambda i: -means[i])[:2])
    technique = OrderedSGD(keep=1 / 3)
    assert torch.equal(gradient(net, batch, technique), gradient(net, rows_of(batch, hardest)))
    assert technique.report() == {"active": 1, "fraction": 1 / 3}


def test_the_largest_of_equal_ones_are_the_first() -> None:
    assert largest(torch.tensor([0.3, 0.1, 0.5, 0.3, 0.2]), k=2).tolist() == [0, 2]
    assert largest(torch.zeros(4), k=3).tolist() == [0, 1, 2]


# -- schedules


def test_the_papers_schedule() -> None:
    asked = (0.0, 0.799, 0.8, 0.899, 0.9, 0.95, 0.994, 0.995, 1.0)
    assert [share_at(a) for a in asked] == [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 8, 1 / 8, 1 / 16, 1 / 16]


def test_right_answers_are_counted_as_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    z, y = torch.randn(5, 3, 4, generator=g), torch.randint(3, (5, 4), generator=g)
    y[0, :2] = -100
    with CountRight() as count:
        F.cross_entropy(z, y)
        F.cross_entropy(z[0].t(), torch.eye(3)[[0, 1, 2, 0]])
        F.mse_loss(z, z)
        F.binary_cross_entropy_with_logits(torch.tensor([2.0, -1.0, 3.0]), torch.tensor([1.0, 1.0, 0.0]))
    right = sum(int(z[i, :, t].argmax()) == int(y[i, t]) for i in range(5) for t in range(4))
    right += sum(int(z[0, :, t].argmax()) == [0, 1, 2, 0][t] for t in range(4))
    assert (int(count.right), int(count.total)) == (right + 1, 18 + 4 + 3)


class Sees(TinyClassifier):
    """Notes how many samples each of its passes has, and whether it is trained on."""

    def __init__(self) -> None:
        super().__init__(lr=0.0, batch_norm=False)
        self.head[0] = nn.Identity()
        self.__dict__["_passes"] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._passes.append((len(batch[0]), torch.is_grad_enabled()))
        return super().training_step(batch, batch_idx)


#: Forward passes on the run's first batch: three with other samples in each half's place, and one for the losses.
LOOKS = 4


def _right_of(net: TinyClassifier, number: int, of: int) -> DataLoader[Any]:
    """Batches of 8 in which the net answers ``number`` of ``of`` samples rightly."""
    x, _ = make_batch("classifier", of)
    with torch.no_grad():
        y = net(x).argmax(1)
    y[number:] = (y[number:] + 1) % 3
    return DataLoader(list(zip(x, y, strict=True)), batch_size=8)


def test_by_accuracy_the_share_falls_as_an_epoch_ends() -> None:
    """14 of 16 right is 0.875: all are trained on in the first epoch, at no pass's cost but the first looks, then a half."""
    net, technique = Sees(), OrderedSGD()
    trainer(technique, max_epochs=3).fit(net, _right_of(net, 14, 16))
    assert net._passes[: LOOKS + 2] == [(8, False)] * LOOKS + [(8, True)] * 2
    assert [n for n, grad in net._passes[LOOKS + 2 :] if grad] == [4] * 4
    assert technique.report()["accuracy"] == 14 / 16, "counted of whole batches, also once a half is trained on"
    assert technique.state_dict()["steps"] == {"on": 4, "off": 2}


def test_stages_by_progress() -> None:
    net = Sees()
    stages = OrderedSGD(keep=[(0.0, 1.0), (0.5, 0.5), (0.75, 0.25)])
    trainer(stages, max_steps=8).fit(net, loader("classifier", 64, 8))
    assert [n for n, grad in net._passes if grad] == [8] * 4 + [4] * 2 + [2] * 2
    (arm,) = type(stages).control.arms(stages).values()
    assert arm.keep == pytest.approx(0.5 * 1 + 0.25 * 0.5 + 0.25 * 0.25)


def test_accuracy_resumes_in_mid_epoch(tmp_path: Path) -> None:
    def run(resume: Path | None = None) -> tuple[Sees, OrderedSGD]:
        from tests.runs import SaveBatches

        torch.manual_seed(3)
        net, technique = Sees(), OrderedSGD()
        callbacks = [technique] if resume else [technique, SaveBatches(tmp_path, [1])]
        trainer(*callbacks, max_epochs=2).fit(net, _right_of(net, 14, 16), ckpt_path=resume)
        return net, technique

    whole, first = run()
    again, second = run(tmp_path / "batch=1.ckpt")
    assert whole._passes[LOOKS + 1 :] == again._passes
    assert first.state_dict() == second.state_dict()


# -- what is refused


def test_accuracy_needs_a_loss_on_classes() -> None:
    class Regression(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch[0]), torch.zeros(len(batch[0]), 3))

    with pytest.raises(LossNotVisible, match=r"keep='accuracy'\): .* Give a number, such as keep=0.5"):
        trainer(OrderedSGD(), max_steps=2).fit(Regression(), loader("classifier"))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0.0, r"keep=0.0\): expected 'accuracy' or a number in \(0, 1\]"),
        (True, r"keep=True\): expected 'accuracy' or a number"),
        ("loss", r"keep='loss'\): expected 'accuracy' or a number in \(0, 1\] or pairs"),
        ([], r"keep=\[\]\): expected 'accuracy' or a number in \(0, 1\] or pairs"),
        ([(0.1, 0.5)], r"with growing fractions from 0: .*The first fraction is 0.1.*keep=\[\(0, 1.0\)"),
        ([(0.0, 0.5), (0.0, 0.2)], r"\(0.0, 0.2\) does not follow \(0.0, 0.5\)"),
        ([(0.0, 1.5)], r"fraction of the batch in \(0, 1\]"),
        ([0.5], "or pairs"),
    ],
)
def test_bad_arguments(keep: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrderedSGD(keep=keep)
    with pytest.raises(ValueError, match=r"sample_loss=3\): expected a function"):
        OrderedSGD(sample_loss=3)  # type: ignore[arg-type]


def test_stages_need_a_budget_and_a_batch_several_samples() -> None:
    t = trainer(OrderedSGD(keep=[(0, 1.0), (0.5, 0.5)]), max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"the Trainer has no end .* or give one number for keep"):
        t.fit(TinyClassifier(), loader("classifier"))
    with pytest.raises(ValueError, match="OrderedSGD: got a batch of 1 sample; expected several"):
        trainer(OrderedSGD(keep=0.5), max_steps=2).fit(TinyClassifier(), loader("classifier", 4, 1))


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "OrderedSGD", {"keep": [[0.0, 1.0], [0.5, 0.5]]}, max_steps=4)
