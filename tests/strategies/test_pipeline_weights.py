"""What micro-batches weigh: the rule that makes their losses the batch's is found, or its absence said."""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core.batches import tensors
from lightning_eff._core.blocks import find_stack
from lightning_eff.strategies._pipeline.batch import split
from lightning_eff.strategies._pipeline.logging import Record
from lightning_eff.strategies._pipeline.losses import UncutLosses
from lightning_eff.strategies._pipeline.view import Stack
from lightning_eff.strategies._pipeline.weights import Tokens, Weights, countable, tell_of_statistics, weighted
from tests.processes import free_port
from tests.strategies.pipeline_hazards import CLASSES, DIM, Norms, Plain

LENGTH, PARTS = 8, 4


@pytest.fixture(autouse=True)
def one_process() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)


def batch() -> dict[str, Tensor]:
    """Samples of all lengths; a label for each position, and one for each sample."""
    lengths = torch.tensor([3, 8, 5, 4, 8, 8, 2, 7])
    inside = torch.arange(LENGTH) < lengths[:, None]
    return {
        "x": torch.randn(8, LENGTH, DIM),
        "labels": torch.randint(CLASSES, (8, LENGTH)).masked_fill(~inside, -100),
        "mask": inside,
        "y": torch.randint(1, CLASSES, (8,)),
    }


class Tokenwise(Plain):
    """A classifier of positions."""

    loss: Callable[..., Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return type(self).loss(self.leave(self.through(self.enter(batch["x"]))), batch)


def labelled(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def shifted(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def masked(logits: Tensor, batch: Any) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].clamp(min=0).flatten(), reduction="none")
    return (each * batch["mask"].flatten()).sum() / batch["mask"].sum()


def by_sample(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.mean(1), batch["y"])


def contrastive(logits: Tensor, batch: Any) -> Tensor:
    z = logits.mean(1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


def noisy(logits: Tensor, batch: Any) -> Tensor:
    return by_sample(logits + torch.randn_like(logits), batch)


def learnt(
    loss: Callable[..., Tensor], given: dict[str, Tensor] | None = None, base: type[Tokenwise] = Tokenwise
) -> tuple[Weights, nn.Module]:
    module = type("Module", (base,), {"loss": staticmethod(loss)})(dropout=0.2)
    stack = Stack(find_stack(module, None, who="test"), who="test")
    weights, given = Weights(who="test"), batch() if given is None else given
    losses = UncutLosses(module, stack, lambda b: module.training_step(b, 0), who="test")
    weights.learn(losses, given, split(given, PARTS))
    weights.agree()
    return weights, module


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (labelled, Tokens("['labels']", "labels", False)),
        (shifted, Tokens("['labels']", "labels", True)),
        (by_sample, None),
    ],
)
def test_the_rule_is_found_and_gives_the_whole_batchs_loss(loss: Callable[..., Tensor], rule: Tokens | None) -> None:
    weights, module = learnt(loss)
    assert weights.rule == rule
    assert module.training and all(m.training for m in module.modules())
    given = batch()
    parts = split(given, PARTS)
    module.eval()
    found = weights.of(parts)
    losses = {i: module.training_step(part, 0).detach() for i, part in enumerate(parts)}
    whole = float(module.training_step(given, 0).detach())
    assert weighted(losses, found, {}) == pytest.approx(whole, abs=1e-6)
    assert (found is None) == (rule is None)
    if found is not None:
        assert sum(found) == pytest.approx(1) and weighted(losses, None, {}) != pytest.approx(whole, abs=1e-3)


def test_a_mask_counts_as_labels_do() -> None:
    """Labels and mask are of the same places here: either is right."""
    weights, _ = learnt(masked)
    assert weights.rule is not None and not weights.rule.shifted
    assert weights.rule.path in ("['labels']", "['mask']")
    assert weights.of(split(batch(), PARTS)) == pytest.approx([11 / 45, 9 / 45, 16 / 45, 9 / 45])


def test_a_loss_that_compares_samples_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="not their mean: .* no mean over samples"):
        weights, _ = learnt(contrastive)
    assert weights.rule is None


def test_noise_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, _ = learnt(noisy)
    assert weights.rule is None


def test_labels_that_come_later_are_warned_of_once() -> None:
    first = batch()
    first["labels"], first["mask"] = first["labels"].clamp(min=1), torch.ones_like(first["mask"])
    weights, _ = learnt(labelled, first)
    assert weights.rule is None
    assert weights.of(split(first, PARTS)) is None
    with pytest.warns(UserWarning, match=r"different numbers of elements of batch\['labels'\] that are not -100"):
        assert weights.of(split(batch(), PARTS)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights.of(split(batch(), PARTS))


class Strict(Tokenwise):
    """A step that cannot run in evaluation mode, with dropout."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.training:
            raise RuntimeError("training alone")
        return super().training_step(batch, batch_idx)


def test_a_step_that_needs_training_mode_tells_its_rule() -> None:
    weights, module = learnt(labelled, base=Strict)
    assert weights.rule == Tokens("['labels']", "labels", False)
    assert all(m.training for m in module.modules())


@pytest.mark.parametrize("loss", [labelled, shifted, masked])
def test_a_micro_batch_without_labels_weighs_nothing(loss: Callable[..., Tensor]) -> None:
    weights, module = learnt(loss)
    given = batch()
    given["labels"][2:4] = -100
    given["mask"][2:4] = False
    module.eval()
    before = copy.deepcopy(given)
    microbatches = split(given, PARTS)
    found = weights.of(microbatches)
    assert found is not None and found[1] == 0.0 and sum(found) == pytest.approx(1)
    expected = gradients(module, [(1.0, given)])
    assert all(g.isfinite().all() for g in expected)
    defined = weights.defined(microbatches, found)
    torch.testing.assert_close(gradients(module, zip(found, defined, strict=True)), expected)
    step = cast("Any", module).training_step
    losses = {i: step(part, i).detach() for i, part in enumerate(defined)}
    assert weighted(losses, found, {}) == pytest.approx(float(step(given, 0).detach()), abs=1e-6)
    for (path, mine), (_, then) in zip(tensors(given), tensors(before), strict=True):
        torch.testing.assert_close(mine, then, rtol=0, atol=0, msg=path)


def gradients(module: nn.Module, parts: Iterable[tuple[float, Any]]) -> list[Tensor]:
    """Of the weighted sum of the losses of ``parts``."""
    module.zero_grad()
    for weight, part in parts:
        (weight * cast("Any", module).training_step(part, 0)).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_ways_to_count() -> None:
    ways = countable(batch())
    assert {(way.path, way.kind) for way in ways} == {
        ("['labels']", "labels"),
        ("['labels']", "padding"),
        ("['mask']", "padding"),
    }
    assert Tokens("['labels']", "labels", True).counts(split(batch(), 8)) == [2, 7, 4, 3, 7, 7, 1, 6]


def test_the_logged_loss_has_the_losses_weights() -> None:
    losses = {1: torch.tensor(2.0), 0: torch.tensor(4.0)}
    records = {
        "loss": Record({}, [torch.tensor(2.0), torch.tensor(4.0)]),
        "other": Record({}, [torch.tensor(2.0), torch.tensor(3.0)]),
    }
    assert weighted(losses, [0.25, 0.75], records) == 0.75 * 2 + 0.25 * 4
    assert float(records["loss"].value()) == 2.5 and float(records["other"].value()) == 2.5


def test_ranks_take_the_rules_of_the_first_that_found_any(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, other = Tokens("['labels']", "labels", True), Tokens("['mask']", "padding", False)
    told = [([], {rule}), ([rule], {rule}), ([other], {other})]
    monkeypatch.setattr(dist, "get_world_size", lambda: len(told))
    monkeypatch.setattr(dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), told))
    weights = Weights(who="test")
    weights.agree()
    assert weights.rule == rule and weights._tried == {rule, other}


@pytest.mark.parametrize("number", [1, 2])
def test_norms_over_micro_batches_are_named(number: int, caplog: pytest.LogCaptureFixture) -> None:
    module = Norms()
    module.before.eval()
    with caplog.at_level("INFO"):
        tell_of_statistics(module, number, 8 // number, who="Here")
    said = [r.getMessage() for r in caplog.records]
    if number == 1:
        assert said == []
    else:
        assert len(said) == 1
        assert said[0].startswith(
            "Here: 'blocks.0.norm' and 4 more modules normalize over each of 2 micro-batches of 4"
        )
    caplog.clear()
    tell_of_statistics(Plain(), 2, 4, who="Here")
    assert caplog.records == []
