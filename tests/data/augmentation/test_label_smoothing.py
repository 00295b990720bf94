"""LabelSmoothing: each kind of loss against its equation, on images and texts, alone and with mixtures."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.selection import selective_backprop
from tests.cases import Case, own_loss
from tests.data.augmentation.modules import CLASSES, LOSSES, WEIGHTS, Ids, Own, Spied, batches, codes, train, vit
from tests.models import HuggingFace, flat, hugging_face, loader, make_batch, module, trainer
from tests.runs import fit_yaml

CASES = {
    "LabelSmoothing": Case(
        active=lambda: eff.LabelSmoothing(),
        neutral=lambda: eff.LabelSmoothing(epsilon=0.0),
        lost=(own_loss, "classifier", "no loss call of training_step was seen"),
    )
}
EPSILON = 0.3


def smooth(p: Tensor) -> Tensor:
    """``(1 - epsilon) y + epsilon / K``."""
    return (1 - EPSILON) * p + EPSILON / p.shape[-1]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "smoothed"])
def test_losses_are_those_on_smoothed_targets(name: str) -> None:
    loss, soft = LOSSES[name]
    net = train(Own(loss), eff.LabelSmoothing(epsilon=EPSILON))
    x, y = batches()[0]
    assert net.losses[-1] == pytest.approx(soft(Own(loss)(x), smooth(codes(y))).item(), rel=1e-5)


def test_binary_labels_of_each_class_go_to_one_half() -> None:
    x, y = batches()[0]
    yes = torch.rand(len(y), CLASSES, generator=torch.Generator().manual_seed(0)).round()
    net = train(Own(F.binary_cross_entropy_with_logits), eff.LabelSmoothing(epsilon=EPSILON), data=[(x, yes)])
    z = Own(F.binary_cross_entropy_with_logits)(x)
    expected = LOSSES["binary"][1](z, (1 - EPSILON) * yes + EPSILON / 2)
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("nll", [False, True])
def test_ignored_labels_and_weights(reduction: str, nll: bool) -> None:
    """As ``F.cross_entropy(label_smoothing=)`` has them, whether or not the step takes logarithms itself."""

    def loss(z: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
        if nll and not kwargs:
            return F.nll_loss(z.log_softmax(-1), y, weight=WEIGHTS, reduction=reduction, ignore_index=2)
        return F.cross_entropy(z, y, weight=WEIGHTS, reduction=reduction, ignore_index=2, **kwargs)

    x, y = batches()[0]
    assert bool((y == 2).any())
    net = train(Own(loss), eff.LabelSmoothing(epsilon=EPSILON))
    expected = loss(Own(loss)(x), y, label_smoothing=EPSILON)
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_face_models_on_tokens(name: str) -> None:
    """Shifted and ignored labels as the model has them: a smoothed loss written out."""
    net: Any = hugging_face(name, num_layers=1)
    twin = copy.deepcopy(net)
    batch = make_batch(name)
    losses: list[float] = []

    class Noting(HuggingFace):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    train(Noting(net.model), eff.LabelSmoothing(epsilon=EPSILON), data=[batch])
    with torch.no_grad():
        z, y = twin.model(**batch).logits, batch["labels"]
    z, y = (z, y) if name == "bert" else (z[:, :-1], y[:, 1:])
    log_p = z.log_softmax(-1)[y >= 0]
    own = log_p.gather(-1, y[y >= 0][:, None]).mean()
    expected = -(1 - EPSILON) * own - EPSILON * log_p.mean()
    assert losses[-1] == pytest.approx(expected.item(), rel=1e-4)


def test_images_and_texts() -> None:
    for net, data in (
        (vit(), batches(3)),
        (Ids(), [{"input_ids": torch.ones(4, 5).long(), "labels": torch.arange(4)}]),
    ):
        technique = eff.LabelSmoothing()
        train(net, technique, data=data)
        assert technique.report() == {"epsilon": 0.1, "calls": 1}
        assert technique.summary() == f"smoothed the targets of {len(data)} batches by 0.1"


@pytest.mark.parametrize("cls", [eff.Mixup, eff.CutMix])
@pytest.mark.parametrize("name", ["cross-entropy", "nll", "binary", "weights, sum"])
def test_mixtures_are_smoothed_as_their_targets_are(name: str, cls: Any) -> None:
    loss, soft = LOSSES[name]
    mixing = cls(alpha=8.0, per_sample=True)
    spied = Spied(mixing)
    net = train(Own(loss), mixing, eff.LabelSmoothing(epsilon=EPSILON))
    x = net.given[-1][0]
    expected = soft(Own(loss)(x), smooth(spied.targets(0, batches()[0][1])))
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


def test_samples_are_chosen_by_hard_labels_and_trained_on_smoothed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Tensor] = []
    probabilities = selective_backprop.keep_probabilities

    def spy(losses: Tensor, history: Tensor, *, beta: float) -> Tensor:
        scored.append(losses)
        return probabilities(losses, history, beta=beta)

    monkeypatch.setattr(selective_backprop, "keep_probabilities", spy)
    net = train(Own(F.cross_entropy), eff.LabelSmoothing(epsilon=EPSILON), eff.SelectiveBackprop(keep=0.5))
    (x, y), twin = batches()[0], Own(F.cross_entropy)
    torch.testing.assert_close(scored[0].float(), F.cross_entropy(twin(x), y, reduction="none"), rtol=1e-5, atol=1e-6)
    trained, labels = net.given[-1]
    assert len(labels) == 3
    expected = F.cross_entropy(twin(trained), labels, label_smoothing=EPSILON)
    assert net.losses[-1] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "beside",
    [
        lambda: eff.SpanMasking(mask_token_id=3),
        eff.SharpnessAwareMinimization,
        lambda: eff.KSAM(keep=1.0),
        eff.LookSAM,
        lambda: eff.EfficientSAM(gamma=1.0),
    ],
    ids=["SpanMasking", "SAM", "KSAM", "LookSAM", "ESAM"],
)
def test_labels_that_others_make_and_passes_that_they_repeat_are_smoothed_once(beside: Callable[[], Any]) -> None:
    """A run with a loss that is smoothed by hand, on the labels that the step gets, ends with the same weights."""

    def smoothed(self: Any, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch["input_ids"], batch["decoder_input_ids"])
        return F.cross_entropy(z.flatten(0, 1), batch["labels"].flatten(), label_smoothing=EPSILON)

    def run(*callbacks: Any, by_hand: bool = False) -> Tensor:
        pl.seed_everything(1, verbose=False)
        net = module("translator")
        if by_hand:
            net.training_step = MethodType(smoothed, net)
        trainer(*callbacks, max_steps=5).fit(net, loader("translator", 20))
        return flat(net)

    got, expected = run(beside(), eff.LabelSmoothing(epsilon=EPSILON)), run(beside(), by_hand=True)
    assert float((got - expected).abs().max()) < 1e-3 * float((got - run(beside())).abs().max())


def test_evaluation_is_not_smoothed() -> None:
    class Noting(Own):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.evaluated.append(F.cross_entropy(self(batch[0]), batch[1]).item())

    data = batches(1)
    net: Any = train(
        Noting(F.cross_entropy), eff.LabelSmoothing(), data=data, limit_val_batches=1, val_check_interval=1
    )
    assert net.evaluated[0] == pytest.approx(F.cross_entropy(net(data[0][0]), data[0][1]).item(), rel=1e-6)


def _already(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        (_already, None, r"with label_smoothing=0.1, so labels would be smoothed twice"),
        (lambda z, y: F.mse_loss(z[:, 0], y), torch.rand(6), r"targets of F.mse_loss, so they are no classes"),
        (
            lambda z, y: F.mse_loss(z[:, 0], y),
            torch.rand(6) + 5,
            r"are no classes: they are neither integers nor probabilities",
        ),
        (lambda z, y: -z.log_softmax(-1).gather(1, y[:, None]).mean(), None, r"no loss call of training_step was seen"),
    ],
)
def test_what_cannot_be_smoothed_is_refused(loss: Callable[..., Tensor], labels: Tensor | None, message: str) -> None:
    x, y = batches()[0]
    with pytest.raises(ValueError, match=f"^LabelSmoothing: .*{message}"):
        train(Own(loss), eff.LabelSmoothing(), data=[(x, y if labels is None else labels)])


class Graphs:
    """A batch that keeps its tensors to itself, as batches of graphs do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.num_graphs = x, y, len(y)

    def to(self, device: Any, **_: Any) -> "Graphs":
        return self


def test_an_object_that_keeps_its_labels_is_named() -> None:
    class OfGraphs(Own):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch.x, batch.y), batch_idx)

    with pytest.raises(
        ValueError, match=r"^LabelSmoothing: the batch holds an object of class Graphs, .* Collate batches"
    ):
        train(OfGraphs(F.cross_entropy), eff.LabelSmoothing(), data=[Graphs(*batches()[0])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": -0.1}, r"epsilon=-0.1\): expected a number in \[0, 1\)"),
        ({"epsilon": 1}, r"epsilon=1\): expected a number in \[0, 1\)"),
        ({"labels": "y"}, r"labels='y'\): expected a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^LabelSmoothing\({message}"):
        eff.LabelSmoothing(**arguments)


def test_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LabelSmoothing", {"epsilon": 0.2}, max_steps=4)
