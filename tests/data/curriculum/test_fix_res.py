"""FixRes: small images, then classifier and norms alone on full ones; every other parameter keeps its bits."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff._core._images.images import resize
from lightning_eff.data.curriculum.fix_res import FixRes
from tests.cases import ALL, MISSING, Case, classifier
from tests.data.curriculum.test_progressive_resizing import Net, batches, train
from tests.models import loader, module, trainer

_NO_IMAGES = "found no images in the batch"

CASES = {
    "FixRes": Case(
        active=lambda: FixRes(scale=0.75, until=0.5, multiple_of=2),  # averages, which begin anew, have the other half
        neutral=lambda: FixRes(scale=1.0),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt"), _NO_IMAGES),
        lost=(classifier, "classifier", _NO_IMAGES),
    )
}


class Deep(Net):
    """Two convolutions with BatchNorm, with decay and momentum of every kind."""

    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
        )
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind in ("sgd", "zeroed"):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, foreach=self.kind == "foreach")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.kind != "zeroed")


class Trace(pl.Callback):
    """What the module is after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.states.append({name: value.detach().clone() for name, value in pl_module.state_dict().items()})


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


NORMS = {f"body.{i}.{name}" for i in (1, 4) for name in ("weight", "bias")}
RUNNING = {f"body.{i}.{name}" for i in (1, 4) for name in ("running_mean", "running_var", "num_batches_tracked")}
HEAD = {"head.weight", "head.bias"}


# -- T: every other parameter is bitwise unchanged from then on


@pytest.mark.parametrize("kind", ["sgd", "zeroed", "adamw", "foreach"])
@pytest.mark.parametrize("norms", ["all", "last"])
def test_all_else_keeps_its_bits(norms: Any, kind: str) -> None:
    trace, technique = Trace(), FixRes(scale=0.5, until=0.5, norms=norms)
    net: Any = train(Deep(kind), technique, trace, data=batches(10))
    sides = [t.shape[-1] for t in net.given]
    assert sides == [8] * 5 + [16] * 5
    assert moved(trace.states[0], trace.states[4]) == set(trace.states[0])
    tuned = HEAD | {name for name in NORMS | RUNNING if norms == "all" or ".4." in name}
    for last, state in zip(trace.states[4:-1], trace.states[5:], strict=True):
        assert moved(last, state) == tuned
    assert technique.report()["tuned"] == sum(net.get_parameter(name).numel() for name in tuned & {*HEAD, *NORMS})
    assert all(p.requires_grad for p in net.parameters()), "what was frozen is thawed after the fit"
    assert all(m.training for m in net.modules())


class Shown(Trace):
    """What validation sees as well, and what a checkpoint would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        saved = trainer.strategy.lightning_module_state_dict()
        self.shown.append({name: value.detach().clone() for name, value in saved.items()})

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.shown.append({name: value.detach().clone() for name, value in pl_module.state_dict().items()})


OF_WEIGHTS = ("ExponentialMovingAverage", "LatestWeightAveraging", "Lookahead", "RegularizedNonlinearAcceleration")
OF_STEPS = (
    "ScheduleFree",
    "StochasticWeightAveraging",
    "TrainableWeightAveraging",
    "SharpnessAwareMinimization",
    "LookSAM",
)


@pytest.mark.parametrize("name", [name for name in (*OF_WEIGHTS, *OF_STEPS) if name not in MISSING])
def test_so_it_does_beside_what_shows_or_steps_from_other_weights(name: str) -> None:
    """In training, in validation, in checkpoints and after the fit."""
    shown, net = Shown(), Deep("adamw")
    techniques = (ALL[name].active(), FixRes(scale=0.5, until=0.5, norms="last"))
    t = trainer(*techniques, shown, max_epochs=1, limit_val_batches=1, val_check_interval=1)
    t.fit(net, DataLoader(batches(10), None), DataLoader(batches(1), None))
    fixed = {n for n in shown.states[0] if n.startswith("body") and not n.startswith("body.4")}
    assert len(shown.states) == 10 and len(shown.shown) == 20 and moved(shown.states[0], shown.states[4]) >= fixed
    for state in [*shown.states[5:], *shown.shown[10:], net.state_dict()]:
        assert not moved(shown.states[4], state) & fixed
    tuned = set().union(*(moved(shown.states[4], state) for state in shown.states[5:]))
    assert tuned > HEAD


def test_statistics_are_those_of_full_images() -> None:
    """A norm's running mean after one step of tuning, by the rule of BatchNorm."""
    trace, data = Trace(), batches(6)
    net: Any = train(Deep(), FixRes(scale=0.5, until=0.5), trace, data=data)
    before, after = trace.states[2], trace.states[3]
    x = F.conv2d(data[3][0], before["body.0.weight"], before["body.0.bias"], padding=1)
    expected = 0.9 * before["body.1.running_mean"] + 0.1 * x.mean((0, 2, 3))
    torch.testing.assert_close(after["body.1.running_mean"], expected)
    assert net.given[-1].shape[-1] == 16


def test_it_is_tuned_as_with_the_rest_frozen_by_hand() -> None:
    data = batches(8)
    net = train(Deep(), FixRes(scale=0.5, until=0.5), data=data)
    trace = Trace()
    train(Deep(), FixRes(scale=0.5, until=0.5), trace, data=data)
    twin = Deep()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for i, (images, labels) in enumerate(data):
        for name, p in twin.named_parameters():
            p.requires_grad_(i < 4 or name in HEAD | NORMS)
        small = resize(images, (8, 8)) if i < 4 else images
        optimizer.zero_grad()
        F.cross_entropy(twin(small), labels).backward()
        optimizer.step()
    for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_windows_begin_with_the_tuning_and_other_techniques_go_on() -> None:
    trace = Trace()
    callbacks = [FixRes(scale=0.5, until=0.5), eff.Lookahead(interval=2), trace]
    train(Deep(), *callbacks, data=batches(18), max_steps=6, accumulate_grad_batches=3)
    tuned = HEAD | NORMS | RUNNING
    assert all(moved(trace.states[8], state) <= tuned for state in trace.states[9:])
    assert moved(trace.states[8], trace.states[-1]) >= HEAD
    assert "body.0.weight" in moved(trace.states[5], trace.states[8])


def test_a_resumed_run_tunes_the_same(tmp_path: Path) -> None:
    def run(resume: Path | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        technique = FixRes(scale=0.5, until=0.5)
        save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [technique, eff.Lookahead(interval=3)]  # begins anew with the tuning, not where a run goes on
        t = trainer(*callbacks, *([] if resume else [save]), max_steps=8, enable_checkpointing=resume is None)
        net = Deep("adamw")
        t.fit(net, DataLoader(batches(8), batch_size=None), ckpt_path=resume)
        return net.state_dict(), technique.state_dict()

    whole, state = run()
    assert state["tuning"] and set(state["tuned"]) == NORMS | HEAD
    for step in (4, 6):
        again, other = run(tmp_path / f"step={step}.ckpt")
        assert moved(whole, again) == set() and other == state


# -- which is the classifier


class Sliced(Net):
    """A map to logits of which nothing is known: the last one gives tokens."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(2).transpose(1, 2)).mean(1)


def test_a_classifier_that_is_not_found_is_named() -> None:
    with pytest.raises(ValueError, match=r"found no classifier.* head \(3-D\).*classifier="):
        train(Sliced(), FixRes(), data=batches(4))
    with pytest.raises(ValueError, match=r"classifier='fc'\): Sliced has no module with parameters .*'body.0', 'head'"):
        train(Sliced(), FixRes(classifier="fc"), data=batches(4))
    technique = FixRes(until=0.5, classifier="head")
    train(Sliced(), technique, data=batches(4))
    assert (
        technique.summary()
        == "12 px for 2 steps, 16 px from step 2 on; tuned 4 parameter tensors of classifier and norms"
    )


def test_the_classifier_and_the_norms_of_a_transformer() -> None:
    net, technique = module("vit"), FixRes(scale=0.5, until=0.5)
    trainer(technique, max_steps=4).fit(net, loader("vit"))
    names = technique.state_dict()["tuned"]
    assert {name for name in names if "norm" not in name} == {"model.classifier.weight", "model.classifier.bias"}
    assert len(names) == 2 + 2 * sum(isinstance(m, nn.LayerNorm) for m in net.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0}, r"scale=0\): expected a number in \(0, 1\]"),
        ({"scale": 2}, r"scale=2\): expected a number in \(0, 1\]"),
        ({"until": 0.0}, r"until=0.0\): expected a number in \(0, 1\]"),
        ({"norms": "first"}, r"norms='first'\): expected 'all' or 'last'"),
        ({"multiple_of": 1.5}, r"multiple_of=1.5\): expected an integer"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^FixRes\({message}"):
        FixRes(**arguments)


def test_arms_are_without_the_tuning_and_with_all_parameters_in_it() -> None:
    technique = FixRes(scale=0.5, until=0.6, keys=["x"])
    arms = technique.control.arms(technique)
    assert [*arms] == ["0.5 of the side throughout", "all parameters tuned on full images"]
    throughout, tuned = arms.values()
    assert isinstance(throughout, FixRes) and isinstance(tuned, FixRes) and throughout.tune_all and tuned.tune_all
    assert [throughout.share_of(u) for u in (0.0, 0.9)] == [0.5, 0.5]
    assert [tuned.share_of(u) for u in (0.0, 0.59, 0.6)] == [0.5, 0.5, 1.0] and tuned.keys == ["x"]
    assert FixRes(scale=1.0).control.arms(FixRes(scale=1.0)) == tuned.control.arms(tuned) == {}
    trace, technique = Trace(), FixRes(scale=0.5, until=0.5, tune_all=True)
    net: Any = train(Deep(), technique, trace, data=batches(6))
    assert [t.shape[-1] for t in net.given] == [8] * 3 + [16] * 3
    assert moved(trace.states[2], trace.states[3]) == set(trace.states[2])
    assert technique.report()["tuned"] == sum(p.numel() for p in net.parameters())
