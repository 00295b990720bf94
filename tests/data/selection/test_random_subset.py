"""RandomSubset, the control of techniques that choose samples: how many, which, and at no extra pass."""

import copy
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import ImportanceSampling, SelectiveBackprop
from lightning_eff._core.technique import Technique
from lightning_eff.data.selection._random_subset import RandomSubset
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import TinyClassifier, loader, module, trainer

CASES = {
    "RandomSubset": Case(active=lambda: RandomSubset(keep=0.5), neutral=lambda: RandomSubset(keep=1.0), anywhere=True)
}


class Watch(pl.Callback):
    """The batches that reach ``training_step`` to be trained on, by the tensor that ``of`` picks, and the extra passes."""

    def __init__(self, of: Any = lambda batch: batch) -> None:
        self.of = of
        self.batches: list[Any] = []
        self.scored = 0
        self.extra_passes = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        step = type(pl_module).training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            if torch.is_grad_enabled():
                self.batches.append(self.of(batch))
            else:
                self.scored += 1
            return step(pl_module, batch, batch_idx)

        pl_module.training_step = training_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        technique = next(c for c in trainer.callbacks if isinstance(c, Technique))
        self.extra_passes = technique.session.chain.cost.forward_passes
        del pl_module.training_step


class Counter(pl.LightningModule):
    """Takes batches of indices, and learns nothing of note."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def drawn(technique: Technique, *others: pl.Callback, size: int = 5, steps: int = 12, **kwargs: Any) -> list[list[int]]:
    """The samples that each step trains on, of batches ``0 .. size - 1``."""
    pl.seed_everything(0, verbose=False)
    watch = Watch(Tensor.tolist)
    data = DataLoader([torch.arange(size).float() for _ in range(steps)], batch_size=None)
    trainer(watch, *others, technique, **{"max_steps": steps, **kwargs}).fit(Counter(), data)
    assert watch.extra_passes == watch.scored == 0
    return [[int(i) for i in batch] for batch in watch.batches]


@pytest.mark.parametrize(
    ("keep", "size", "expected"), [(0.5, 4, 2), (1 / 3, 7, 2), (0.7, 5, 4), (0.01, 5, 1), (0.9, 2, 2)]
)
def test_as_many_as_asked_for_without_a_pass(keep: float, size: int, expected: int) -> None:
    assert [len(index) for index in drawn(RandomSubset(keep=keep), size=size)] == [expected] * 12


def test_every_sample_as_often_and_none_twice() -> None:
    steps, size, keep = 500, 5, 0.4
    counts = torch.zeros(size)
    found = drawn(RandomSubset(keep=keep), size=size, steps=steps)
    for index in found:
        assert index == sorted(set(index)) and len(index) == 2
        counts[index] += 1
    pairs = {tuple(index) for index in found}
    assert len(pairs) == 10, "all of the subsets come"
    for share in (counts / steps).tolist():
        assert abs(share - keep) < 4.5 * math.sqrt(keep * (1 - keep) / steps)


@pytest.mark.parametrize(
    ("settings", "acting"),
    [
        ({}, range(12)),
        ({"interval": 3}, [0, 3, 6, 9]),
        ({"start": 0.5}, range(6, 12)),
        ({"end": 0.25}, range(3)),
        ({"start": 0.25, "end": 0.75, "interval": 2}, [4, 6, 8]),
    ],
)
def test_acts_when_selective_backprop_does(settings: dict[str, Any], acting: Any) -> None:
    """In the same steps, on as many samples; the recipe pays a pass for each, its control none."""
    recipe = SelectiveBackprop(keep=0.6, **settings)
    (arm,) = recipe.control.arms(recipe).values()
    sizes, scored = {}, {}
    for technique in (recipe, arm):
        pl.seed_everything(0, verbose=False)
        watch = Watch(lambda batch: len(batch[1]))
        assert isinstance(technique, Technique)
        trainer(watch, technique, max_steps=12).fit(TinyClassifier(), loader("classifier", 60, 5))
        sizes[technique.name()] = watch.batches
        scored[technique.name()] = (watch.extra_passes > 0, watch.scored > 0)
    expected = [3 if step in acting else 5 for step in range(12)]
    assert sizes == {"selective_backprop": expected, "random_subset": expected}
    assert scored == {"selective_backprop": (True, True), "random_subset": (False, False)}


def test_the_gradient_is_the_plain_mean_over_those_drawn() -> None:
    pl.seed_everything(0, verbose=False)
    net = TinyClassifier(batch_norm=False)
    net.head[0] = nn.Identity()
    watch, gradients = Watch(lambda batch: batch), []

    class Gradient(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradients.append([p.grad.clone() for p in module.parameters()])

    before = copy.deepcopy(net)
    trainer(watch, Gradient(), RandomSubset(keep=0.5), max_steps=1).fit(net, loader("classifier", 20, 10))
    x, y = watch.batches[0]
    assert len(x) == len(y) == 5
    F.cross_entropy(before(x), y).backward()
    for p, g in zip(before.parameters(), gradients[0], strict=True):
        assert p.grad is not None and torch.equal(p.grad, g)


def test_micro_batches_epochs_and_ranks_draw_their_own_and_the_seed_says_which() -> None:
    class OnRankOne(Nop):
        def attach(self, session: Any) -> None:
            session.rank = 1

    settings: dict[str, Any] = {"size": 40, "steps": 4, "accumulate_grad_batches": 2, "max_steps": 4}  # 2 epochs
    first = drawn(RandomSubset(keep=0.5), **settings)
    assert len({tuple(index) for index in first}) == len(first) == 8
    assert drawn(RandomSubset(keep=0.5), **settings) == first
    assert not any(index in first for index in drawn(RandomSubset(keep=0.5), OnRankOne(), **settings))


def test_report_and_summary() -> None:
    technique = RandomSubset(keep=0.4, interval=2)
    drawn(technique, steps=4)
    assert technique.report() == {"active": 0, "fraction": 1.0}
    assert technique.summary() == "drew samples in 2 of 4 steps, trained on 14 of 20 samples"
    drawn(technique, steps=3)
    assert technique.report() == {"active": 1, "fraction": 0.4}
    assert technique.summary() == "drew samples in 2 of 3 steps, trained on 9 of 15 samples"


# -- whose control it is


def test_arms_have_the_recipes_own_arguments() -> None:
    recipe = SelectiveBackprop(keep=0.3, beta=2.0, start=0.1, end=0.8, interval=4)
    (name,) = arms = recipe.control.arms(recipe)
    arm = arms[name]
    assert name == "a random 30% of each batch"
    assert isinstance(arm, RandomSubset)
    assert (arm.keep, arm.start, arm.end, arm.interval) == (0.3, 0.1, 0.8, 4)
    other = ImportanceSampling(presample=4.0, threshold=1.5)
    (name,) = arms = other.control.arms(other)
    arm = arms[name]
    assert name == "a random 25% of each batch"
    assert isinstance(arm, RandomSubset)
    assert (arm.keep, arm.start, arm.end, arm.interval) == (0.25, 0.0, 1.0, 1)


@pytest.mark.parametrize("presample", [1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("size", [2, 5, 9, 12])
def test_as_many_samples_as_importance_sampling_draws(presample: float, size: int) -> None:
    recipe = ImportanceSampling(presample=presample, threshold=0.5)
    (arm,) = recipe.control.arms(recipe).values()
    sizes = []
    for technique in (recipe, arm):
        watch = Watch(lambda batch: len(batch[1]))
        trainer(watch, technique, max_steps=2).fit(TinyClassifier(batch_norm=False), loader("classifier", 60, size))
        sizes.append(watch.batches)
    assert sizes[0] == sizes[1] == [max(1, round(size / presample))] * 2


@pytest.mark.parametrize(
    "technique",
    [ImportanceSampling(threshold=math.inf), ImportanceSampling(presample=1.0), SelectiveBackprop(keep=1.0)],
)
def test_what_trains_on_everything_has_no_arm(technique: Technique) -> None:
    assert technique.control.arms(technique) == {}


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0\): expected a number in \(0, 1\]"),
        ({"keep": 1.5}, r"keep=1.5\): expected"),
        ({"keep": 0.5, "start": 0.5, "end": 0.5}, r"start=0.5, end=0.5\): start must be below end"),
        ({"keep": 0.5, "interval": 0}, r"interval=0\): expected an integer >= 1"),
        ({"keep": 0.5, "interval": True}, r"interval=True\): expected an integer >= 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomSubset(**arguments)


def test_a_run_without_end_is_refused_where_the_budget_counts() -> None:
    with pytest.raises(ValueError, match=r"RandomSubset\(start=0.5, end=1.0\): the Trainer has no end"):
        drawn(RandomSubset(keep=0.5, start=0.5), max_steps=-1, max_epochs=-1)


def test_one_sample_is_refused_at_the_first_batch_and_kept_later() -> None:
    with pytest.raises(ValueError, match=r"got a batch of 1 sample; expected several.*batch_size"):
        drawn(RandomSubset(keep=0.5), size=1)
    watch = Watch(lambda batch: len(batch[1]))
    net = TinyClassifier(batch_norm=False)
    trainer(watch, RandomSubset(keep=0.5), max_steps=3).fit(net, loader("classifier", 9, 4))
    assert watch.batches == [2, 2, 1]


@pytest.mark.parametrize("other", [ImportanceSampling(), SelectiveBackprop()])
def test_does_not_train_beside_what_it_controls(other: Technique) -> None:
    with pytest.raises(ValueError, match="cannot train together: both choose the samples"):
        trainer(RandomSubset(keep=0.5), other, max_steps=1).fit(module("classifier"), loader("classifier"))
