"""DataPruning: scores are those of the papers' formulas by hand, the best alone are trained on, and the cost is counted."""

import copy
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import DataPruning
from lightning_eff.data.selection._offline.scores import (
    best,
    norm_of_map_gradient,
    prototype_distances,
    without_samples,
)
from tests.cases import Case, no_map, own_loss
from tests.data.selection.numbered import N, Net, Numbered, run
from tests.models import TinyClassifier, hugging_face, loader, make_batch, module, trainer
from tests.runs import fit_yaml
from tests.strategies.launch import launch

CASES = {
    "DataPruning": Case(
        active=lambda: DataPruning("el2n", 0.5),
        neutral=lambda: DataPruning("el2n", 1.0),
        anywhere=True,
        refuses_manual=True,
    )
}


class Before(Callback):
    """A copy of the module as it was when so many epochs were done."""

    def __init__(self, epochs: int = 1) -> None:
        self.epochs = epochs

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.epochs == 0:
            self.net = copy.deepcopy(pl_module).eval()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epochs - 1:
            self.net = copy.deepcopy(pl_module).eval()


def whole() -> tuple[Tensor, Tensor]:
    x, y = zip(*(Numbered()[i] for i in range(N)), strict=True)
    return torch.stack(x), torch.stack(y)


def scores_of(technique: DataPruning) -> Tensor:
    state = technique.state_dict()
    return state["sum"] / state["rounds"]


def errors(net: Net) -> Tensor:
    """``||p - y||``, by hand."""
    x, y = whole()
    with torch.no_grad():
        return (net.head(net.embedded(x)).softmax(1) - F.one_hot(y, 3)).norm(dim=1).double()


def test_el2n_is_the_error_norm_at_the_end_of_the_first_epoch_and_the_hardest_are_kept() -> None:
    """In [0, sqrt 2], one forward pass over the data, no draw of the run's own, and the module as it was."""
    before, technique = Before(), DataPruning("el2n", 0.4)
    net = run([technique, before], max_epochs=3, max_steps=-1)
    scores = scores_of(technique)
    torch.testing.assert_close(scores, errors(before.net), rtol=1e-5, atol=1e-6)
    assert 0 <= scores.min() < scores.max() <= 2**0.5
    kept = set(scores.argsort(descending=True)[:12].tolist())
    assert sorted(i for batch in net._seen[:8] for i in batch) == [*range(N)]
    for epoch in (net._seen[8:11], net._seen[11:14]):
        assert sorted(i for batch in epoch for i in batch) == sorted(kept)
    assert len(net._seen) == 14 and technique.report() == {"samples": 12, "share": 0.4, "passes": 1}
    assert "kept 12 of 30 samples, the hardest by el2n, after 1 pass" in technique.summary()
    session = technique._past
    assert session is not None and N <= session.chain.cost.forward_samples <= N + 4 * 4 + 3 * 4, (
        "and looks at two batches"
    )
    assert session.chain.cost.seconds > 0 and session.chain.cost.backward_passes == 0


def test_passes_are_averaged() -> None:
    befores, technique = [Before(2), Before(3)], DataPruning("el2n", 0.5, epochs=3, passes=2)
    run([technique, *befores], max_epochs=4, max_steps=-1)
    mean = (errors(befores[0].net) + errors(befores[1].net)) / 2
    torch.testing.assert_close(scores_of(technique), mean, rtol=1e-5, atol=1e-6)
    assert technique.report()["passes"] == 2


class Softmax(pl.LightningModule):
    """Softmax regression without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3, bias=False)
        nn.init.normal_(self.map.weight, 0, 0.05)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.map(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize("gradients", ["head", "all"])
def test_grand_of_a_linear_softmax_is_error_times_input(gradients: str) -> None:
    """``||p - y|| ||x||``."""
    net, technique = Softmax(), DataPruning("grand", epochs=0, gradients=gradients)
    run(technique, net=net, max_steps=1)
    x, y = whole()
    wanted = (net.map(x).softmax(1) - F.one_hot(y, 3)).norm(dim=1) * x.norm(dim=1)
    torch.testing.assert_close(scores_of(technique), wanted.double().detach(), rtol=1e-4, atol=1e-6)
    session = technique._past
    assert session is not None and session.chain.cost.backward_passes == (8 if gradients == "head" else N)


@pytest.mark.parametrize("name", ["classifier", "padded"])
@pytest.mark.parametrize("gradients", ["head", "all"])
def test_grand_is_the_norm_of_the_gradient_of_the_samples_own_loss(name: str, gradients: str) -> None:
    """One by one, by autograd: with several rows, some of which do not count, and a bias."""
    torch.manual_seed(1)
    net: Any = module(name)
    technique = DataPruning("grand", 0.5, epochs=0, gradients=gradients)
    before = Before(0)
    trainer(technique, before, max_steps=1).fit(net, loader(name, 8, 3, shuffle=False))
    batch, twin = make_batch(name, 8), before.net
    chosen = [*twin.parameters()] if gradients == "all" else [*twin.head.parameters()]
    wanted = []
    twin.log = lambda *args, **kwargs: None
    for i in range(8):
        one = {k: v[i : i + 1] for k, v in batch.items()} if isinstance(batch, dict) else [t[i : i + 1] for t in batch]
        grads = torch.autograd.grad(type(net).training_step(twin, one, 0), chosen, allow_unused=True)
        wanted.append(torch.cat([g.flatten() for g in grads if g is not None]).norm())
    torch.testing.assert_close(scores_of(technique), torch.stack(wanted).double(), rtol=1e-4, atol=1e-7)


def test_the_norm_of_a_maps_gradient() -> None:
    x, g = torch.randn(5, 7, 4, dtype=torch.float64), torch.randn(5, 7, 3, dtype=torch.float64)
    plain, bias = torch.einsum("btc,btd->bcd", g, x), g.sum(1)
    torch.testing.assert_close(norm_of_map_gradient(x, g, bias=False), plain.flatten(1).norm(dim=1))
    both = torch.cat([plain.flatten(1), bias], 1).norm(dim=1)
    torch.testing.assert_close(norm_of_map_gradient(x, g, bias=True), both)


# -- prototypes


def test_the_distance_to_a_centroid_is_zero_at_it_and_with_one_cluster_that_to_the_mean() -> None:
    at = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    assert prototype_distances(at.repeat(4, axis=0), 3, 1).abs().max() == 0
    x = np.random.default_rng(0).normal(size=(20, 3))
    wanted = torch.from_numpy(np.linalg.norm(x - x.mean(0), axis=1))
    torch.testing.assert_close(prototype_distances(x, 1, 0), wanted)


def test_embeddings_are_what_comes_into_the_head() -> None:
    before, technique = Before(0), DataPruning("prototypes", 0.5, epochs=0, clusters=1)
    run([technique, before], max_steps=2)
    with torch.no_grad():
        x = before.net.embedded(whole()[0]).double()
    torch.testing.assert_close(scores_of(technique), (x - x.mean(0)).norm(dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["gpt2", "vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert", "t5", "videomae"))]
)
@pytest.mark.parametrize("score", ["grand", "prototypes"])
def test_heads_of_hugging_face_models_are_found(name: str, score: str) -> None:
    technique = DataPruning(score, 0.5, epochs=0, clusters=2)
    trainer(technique, max_steps=2).fit(hugging_face(name, num_layers=2), loader(name, 8))
    assert scores_of(technique).min() >= 0 and len(scores_of(technique).unique()) > 2
    assert technique.report()["samples"] == 4


# -- what is kept


def test_the_best_are_kept() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.9, 0.2, 0.7])
    assert best(scores, 2, easy=False).tolist() == [1, 3]
    assert best(scores, 3, easy=True).tolist() == [0, 2, 4]
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    assert best(scores, 4, easy=False, labels=labels, balance=1.0).tolist() == [1, 2, 3, 4]
    assert best(scores, 4, easy=False, labels=labels, balance=0.5).tolist() == [1, 2, 3, 5]
    rare = torch.tensor([0, 1, 1, 1, 1, 1])
    assert best(scores, 4, easy=False, labels=rare, balance=1.0).tolist() == [0, 1, 3, 5], (
        "all of a class that has fewer"
    )


def test_classes_are_balanced_by_the_loss_calls_labels() -> None:
    technique = DataPruning("random", 0.4, epochs=0, balance=1.0)
    net = run(technique, max_epochs=1, max_steps=-1)
    drawn = [i % 3 for batch in net._seen for i in batch]
    assert [drawn.count(c) for c in range(3)] == [4, 4, 4]
    assert technique.state_dict()["labels"].tolist() == [i % 3 for i in range(N)]


def test_classes_without_a_sample_left_are_found() -> None:
    labels = torch.tensor([7, 7, 3, 3, 3, 5, 9, 9])
    for kept, least, expected in (([0, 2, 6], 1, [5]), ([0], 2, [3, 9]), ([0], 1, [3, 5, 9]), ([0, 2, 5, 7], 1, [])):
        assert without_samples(labels, torch.tensor(kept), least) == expected
    assert without_samples(torch.tensor([-100, -100, 1, 2]), torch.tensor([3]), 1) == [1], "what is ignored is no class"


def test_a_class_that_is_wholly_left_out_is_told() -> None:
    """A module that takes all for class 0 finds no error in class 0, and the hardest are those of the other classes."""

    def net() -> Net:
        own = Net()
        own.head.bias.data.copy_(torch.tensor([20.0, 0.0, 0.0]))
        return own

    data = DataLoader(Numbered(90), 4, shuffle=True)
    with pytest.warns(UserWarning, match=r"none of the 60 kept samples is of class 0, which the module will forget"):
        run(DataPruning("el2n", 2 / 3, epochs=0), data, net=net(), max_epochs=1, max_steps=-1)
    balanced = DataPruning("el2n", 2 / 3, epochs=0, balance=1.0)  # a warning would be an error
    run(balanced, data, net=net(), max_epochs=1, max_steps=-1)
    kept = balanced.state_dict()["kept"] % 3
    assert kept.bincount().tolist() == [20, 20, 20]


def test_the_control_keeps_as_many_at_random_without_a_pass() -> None:
    recipe = DataPruning("el2n", 0.4, epochs=2, passes=2, easy=True)
    (arm,) = recipe.control.arms(recipe).values()
    assert isinstance(arm, DataPruning) and (arm.score, arm.keep, arm.epochs) == ("random", 0.4, 2)
    assert arm.control.arms(arm) == {} == recipe.control.arms(DataPruning("el2n", 1.0))
    net = run(arm, max_epochs=4, max_steps=-1)
    assert len(net._seen) == 8 + 8 + 3 + 3 and arm._past is not None and arm._past.chain.cost.forward_passes == 0
    assert len({i for batch in net._seen[16:] for i in batch}) == 12


@pytest.mark.parametrize("score", ["el2n", pytest.param("prototypes", marks=pytest.mark.slow)])
def test_resume_is_bit_for_bit_on_either_side_of_the_scores(score: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    technique = DataPruning(score, 0.5, clusters=3)
    whole = run([technique, saver], max_steps=16, enable_checkpointing=True)
    for step in (3, 8, 10):
        again = DataPruning(score, 0.5, clusters=3)
        resumed = run(again, resume=tmp_path / f"step={step}.ckpt", max_steps=16)
        assert resumed._seen == whole._seen[step:], step
        assert torch.equal(again.state_dict()["kept"], technique.state_dict()["kept"])
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
        )


@pytest.mark.slow
def test_two_processes_score_their_shares_and_keep_the_same() -> None:
    """As one process alone, each sample scored once."""
    names = ("el2n", "grand", "prototypes", "random")
    found = launch("tests.data.selection.numbered", "in_two_processes", *names, world_size=2, timeout=250)
    for score in names:
        alone = DataPruning(score, 0.4, epochs=0, clusters=2, balance=1.0)
        run(alone, max_epochs=1, max_steps=-1)
        state = alone.state_dict()
        for scores, kept, _ in found[score]:
            torch.testing.assert_close(torch.tensor(scores).double(), state["sum"], rtol=1e-4, atol=1e-5)
            assert kept == state["kept"].tolist()
        seen = [i for _, _, indices in found[score] for i in indices]
        assert sorted(seen) == state["kept"].tolist(), score


def test_scores_are_saved_and_used_again(tmp_path: Path) -> None:
    path = str(tmp_path / "scores.npz")
    first = DataPruning("el2n", 0.4, save_as=path)
    run(first, max_epochs=2, max_steps=-1)
    again = DataPruning(path, 0.4, easy=True)
    net = run(again, max_epochs=1, max_steps=-1)
    easiest = scores_of(first).argsort()[:12].tolist()
    assert sorted(i for batch in net._seen for i in batch) == sorted(easiest) and len(net._seen) == 3
    assert again.report()["passes"] == 0
    other = Net()
    with pytest.raises(
        ValueError, match=r"scores.npz belongs to a data set with the fingerprint .*, but the training data set has"
    ):
        run(DataPruning(path), DataLoader(Numbered(shift=0.5), 4), net=other)
    with pytest.raises(ValueError, match=r"belongs to a data set of 30 samples, but the training data set has 29"):
        run(DataPruning(path), DataLoader(Numbered(29), 4), net=other)
    assert not other._seen


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0\): expected a number in \(0, 1\]"),
        ({"keep": 1.1}, r"keep=1.1\): expected"),
        (
            {"score": "hardest"},
            r"score='hardest'\): expected 'el2n', 'grand', 'prototypes' or 'random' or the path",
        ),
        ({"score": "gone.json"}, "gone.json: there is no such file. Give a file of scores"),
        ({"epochs": -1}, r"epochs=-1\): expected an integer >= 0"),
        ({"passes": 2}, r"passes=2, epochs=1\): samples are scored at most once per epoch .*passes=1 or epochs=2"),
        ({"clusters": 0}, r"clusters=0\): expected an integer >= 1"),
        ({"balance": 2.0}, r"balance=2.0\): expected a number in \[0, 1\]"),
        ({"gradients": "some"}, r"gradients='some'\): expected 'head'"),
        ({"save_as": "a.txt"}, r"save_as='a.txt'\): expected a path that ends in .json or .npz"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"DataPruning.*{message}"):
        DataPruning(**arguments)


def test_bad_scores(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"num_samples": 3, "scores": [1.0, 2.0]}))
    with pytest.raises(ValueError, match="got 2 scores and num_samples=3; expected one for each"):
        DataPruning(str(path))
    path.write_text('{"num_samples": 3, "scores": [1.0, NaN, 2.0]}')
    with pytest.raises(ValueError, match="1 of 3 scores are NaN or infinite, the first at index 1"):
        DataPruning(str(path))


@pytest.mark.parametrize(
    ("technique", "net", "name", "message"),
    [
        (DataPruning("el2n"), own_loss, "classifier", "called none of .* with reduction='mean'.* Give the path of a file"),
        (DataPruning("grand"), no_map, "classifier", "found no nn.Linear in Scaled that computes the 3 logits.* a file"),
        (DataPruning("prototypes", head="heads"), TinyClassifier, "classifier", r"no nn.Linear at this path. Choose .*head"),
        (DataPruning("prototypes", clusters=21), TinyClassifier, "classifier", r"clusters=21\): the data set has 20 samples"),
        (DataPruning("el2n", balance=0.5), lambda: module("tiny_gpt"), "tiny_gpt", "expected integers, one class for each"),
    ],
    ids=["loss", "head", "path", "clusters", "labels"],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_before_the_first_step(
    technique: Any, net: Any, name: str, message: str
) -> None:
    one = net()
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match=message):
        trainer(technique, max_steps=9).fit(one, loader(name))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), one.state_dict().values(), strict=True))


def test_a_run_that_ends_before_it_prunes_is_told() -> None:
    with pytest.raises(ValueError, match=r"epochs=2\): the Trainer has max_epochs=2, so the run ends before"):
        run(DataPruning("el2n", epochs=2), max_epochs=2, max_steps=-1)
    technique = DataPruning("el2n", epochs=2)
    with pytest.warns(UserWarning, match="ends after 4 steps, .* about 14, so no sample will be pruned"):
        run(technique, max_steps=4)
    assert "pruned no sample" in technique.summary() and technique.report()["share"] == 1.0


def test_without_scikit_learn_it_is_said_as_the_fit_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"package scikit-learn is not installed.*\.\[select\]"):
        run(DataPruning("prototypes"), max_steps=9)


@pytest.mark.parametrize("score", ["el2n", pytest.param("prototypes", marks=pytest.mark.slow)])
def test_the_command_line_runs_it(score: str, tmp_path: Path) -> None:
    fit_yaml(tmp_path, "DataPruning", {"score": score, "keep": 0.5, "balance": 0.5}, max_steps=7)
