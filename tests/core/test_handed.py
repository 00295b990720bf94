"""Steps that change their batch: other passes on it and techniques that read it find what the loader returned."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import lightning_eff as eff
from lightning_eff._core._samples.handed import Handed
from tests.models import TinyClassifier, flat, make_batch, trainer

Pair = namedtuple("Pair", "x rest")


class Named(TinyClassifier):
    """On dicts of ``x`` and ``labels``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"] * 0.5), batch["labels"])


class Pops(Named):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch.pop("labels")
        batch["logits"] = self(batch["x"] * 0.5)
        return F.cross_entropy(batch["logits"], labels)


class InPlace(Named):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"].mul_(0.5)), batch["labels"])


def named(xs: Any) -> dict[str, torch.Tensor]:
    x, labels = default_collate(xs)
    return {"x": x, "labels": labels}


def trained(module: type[pl.LightningModule], *techniques: Any, collate: Any = named, steps: int = 7) -> torch.Tensor:
    pl.seed_everything(3, verbose=False)
    net = module()
    data = DataLoader(TensorDataset(*make_batch("classifier", 20)), 4, shuffle=True, collate_fn=collate)
    trainer(*techniques, max_steps=steps).fit(net, data)
    return flat(net)


TECHNIQUES = {
    "two passes": lambda: eff.SharpnessAwareMinimization(rho=0.5),
    "a pass that looks": lambda: eff.SelectiveBackprop(keep=0.5, history=8),
    "labels read behind the step": lambda: eff.Mixup(alpha=1.0),
    "gradients of parts": lambda: eff.ImportanceSampling(),
    "scores of the data set": lambda: eff.DataPruning("el2n", 0.5),
    "nothing in the step": lambda: eff.ExactResume(),
    "a pass before the step": lambda: eff.OrthogonalInit(),
}


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("module", [Pops, InPlace])
def test_a_step_that_changes_its_batch_trains_as_one_that_does_not(module: Any, technique: str) -> None:
    build = TECHNIQUES[technique]
    assert torch.equal(trained(module, build()), trained(Named, build()))


@pytest.mark.parametrize("technique", ["two passes", "nothing in the step", "a pass before the step"])
def test_hooks_see_what_the_step_left(technique: str) -> None:
    class Hooked(Pops):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert batch.keys() == {"x", "logits"}

    trained(Hooked, TECHNIQUES[technique]())


@pytest.mark.parametrize("inner", [dict, SimpleNamespace, list])
def test_containers_within_a_tuple_are_put_back(inner: Any) -> None:
    class Nested(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            held = vars(batch.rest) if inner is SimpleNamespace else batch.rest
            labels = held.pop() if inner is list else held.pop("labels")
            return F.cross_entropy(self(batch.x.mul_(0.5)), labels)

    def nest(xs: Any) -> Pair:
        x, labels = default_collate(xs)
        return Pair(x, [labels] if inner is list else inner(labels=labels))

    sam = [eff.SharpnessAwareMinimization(rho=0.5) for _ in range(2)]
    assert torch.equal(trained(Nested, sam[0], collate=nest), trained(Named, sam[1]))


def test_a_tensor_that_is_first_changed_in_a_later_step_stops_a_second_pass() -> None:
    class Later(Named):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 3:
                batch["x"].mul_(2.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"Later\.training_step changed its batch in place.*x = x\.clone"):
        trained(Later, eff.SharpnessAwareMinimization(rho=0.5))
    assert trained(Later, eff.ExactResume()).isfinite().all()  # one pass per batch is plain training


def test_a_pass_without_a_graph_leaves_the_values_of_the_first_batch() -> None:
    handed, x = Handed("Module"), torch.ones(3)
    step = handed.around(lambda batch: batch[0].mul_(2.0))
    with torch.no_grad():
        step((x,))
    assert x.tolist() == [1.0] * 3
    assert step((x,)).tolist() == [2.0] * 3, "the second pass starts from the same values"
    assert x.tolist() == [1.0] * 3
