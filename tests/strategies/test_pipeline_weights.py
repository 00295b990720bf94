"""What micro-batches weigh: the rule that makes their losses the batch's is found, or its absence said."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core.batches import tensors
from lightning_eff._core.blocks import find_stack
from lightning_eff.strategies._pipeline._losses.counting import ADDED, EQUAL, Count, Rule
from lightning_eff.strategies._pipeline._losses.losses import UncutLosses
from lightning_eff.strategies._pipeline._losses.weights import Weights, tell_of_statistics, weighted
from lightning_eff.strategies._pipeline.batch import split
from lightning_eff.strategies._pipeline.logging import Record
from lightning_eff.strategies._pipeline.stack import Stack
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
    loss: Callable[..., Tensor],
    given: dict[str, Tensor] | None = None,
    base: type[Tokenwise] = Tokenwise,
    *,
    zero_head: bool = False,
    parts: int = PARTS,
) -> tuple[Weights, nn.Module]:
    module = type("Module", (base,), {"loss": staticmethod(loss)})(dropout=0.2)
    if zero_head:
        nn.init.zeros_(module.leave.weight)
        nn.init.zeros_(module.leave.bias)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    stack = Stack(find_stack(module, None, who="test"), who="test")
    weights, given = Weights(who="test"), batch() if given is None else given
    losses = UncutLosses(module, stack, lambda b: module.training_step(b, 0), who="test")
    weights.learn(losses, given, parts)
    weights.agree()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return weights, module


def positions(logits: Tensor, labels: Tensor) -> Tensor:
    found = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return found.view(labels.shape)


def labelled_and_by_sample(logits: Tensor, batch: Any) -> Tensor:
    return labelled(logits, batch) + by_sample(logits, batch)


def summed(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def marked(logits: Tensor, batch: Any) -> Tensor:
    """Labels of -1 are no labels."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].clamp(min=-1).flatten(), ignore_index=-1)


def other_than_two(logits: Tensor, batch: Any) -> Tensor:
    """Class 2 is padding."""
    inside = batch["labels"] != 2
    return (positions(logits, batch["labels"]) * inside).sum() / inside.sum()


def as_long_as(logits: Tensor, batch: Any) -> Tensor:
    inside = torch.arange(LENGTH) < batch["lengths"][:, None]
    return (positions(logits, batch["labels"]) * inside).sum() / batch["lengths"].sum()


def by_weight(logits: Tensor, batch: Any) -> Tensor:
    return (positions(logits, batch["labels"]) * batch["weight"]).sum() / batch["weight"].sum()


def by_both(logits: Tensor, batch: Any) -> Tensor:
    inside = (batch["labels"] >= 0) & batch["mask"]
    return (positions(logits, batch["labels"]) * inside).sum() / inside.sum()


def each_sample(logits: Tensor, batch: Any) -> Tensor:
    mask = batch["mask"]
    return ((positions(logits, batch["labels"]) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def known(logits: Tensor, batch: Any) -> Tensor:
    """Of targets some are NaN."""
    return (logits - batch["target"])[~batch["target"].isnan()].pow(2).mean()


def by_class(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.mean(1), batch["y"], weight=torch.tensor([1.0, 1.0, 3.0, 0.5]))


def masked_by_chance(logits: Tensor, batch: Any) -> Tensor:
    chosen = torch.rand(batch["labels"].shape) < 0.3
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].masked_fill(~chosen, -100).flatten())


def denoised(logits: Tensor, batch: Any) -> Tensor:
    """A diffusion model's: times and noise are drawn in the step."""
    t = torch.randint(1, 10, (len(logits),))
    return (logits * t[:, None, None] - torch.randn_like(logits)).pow(2).mean()


def whole() -> dict[str, Tensor]:
    """A batch in which nothing is padded."""
    found = batch()
    lengths, weight = torch.full((8,), LENGTH), torch.ones(8, LENGTH)
    return {
        **found,
        "labels": found["labels"].clamp(min=0),
        "mask": torch.ones_like(found["mask"]),
        "lengths": lengths,
        "weight": weight,
        "target": torch.randn(8, LENGTH, CLASSES),
    }


def padded() -> dict[str, Tensor]:
    """One that comes later."""
    found, g = batch(), torch.Generator().manual_seed(3)
    return {
        **found,
        "lengths": found["mask"].sum(1),
        "weight": torch.rand(8, LENGTH, generator=g),
        "target": torch.randn(8, LENGTH, CLASSES).masked_fill(~found["mask"][..., None], torch.nan),
    }


RIGHT: dict[Callable[..., Tensor], tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], bool]] = {
    labelled: (lambda b: b, False),
    shifted: (lambda b: b, False),
    marked: (lambda b: b, False),
    masked: (lambda b: b, False),
    other_than_two: (lambda b: b, False),
    as_long_as: (lambda b: b, False),
    by_weight: (lambda b: b, False),
    by_both: (lambda b: b, False),
    known: (lambda b: b, False),
    each_sample: (lambda b: b, True),
    by_sample: (lambda b: b, True),
    summed: (lambda b: b, False),
}


@pytest.mark.parametrize("loss", RIGHT)
@pytest.mark.parametrize("first", [whole, padded])
@pytest.mark.parametrize("zero_head", [False, True])
def test_the_rule_that_is_found_gives_the_loss_of_later_batches(
    loss: Callable[..., Tensor], first: Callable[[], dict[str, Tensor]], zero_head: bool
) -> None:
    """Also where the first batch has no padding, and where the head gives all samples one loss at first."""
    weights, module = learnt(loss, first(), zero_head=zero_head)
    assert module.training and all(m.training for m in module.modules())
    module.eval()
    module = module.double()
    nn.init.normal_(cast("Any", module).leave.weight)
    given = {k: v.double() if v.is_floating_point() else v for k, v in padded().items()}
    parts = split(given, PARTS)
    found = weights.of(parts)
    losses = {i: cast("Any", module).training_step(part, 0).detach() for i, part in enumerate(parts)}
    together = float(cast("Any", module).training_step(given, 0).detach())
    assert weighted(losses, found, {}) == pytest.approx(together, abs=1e-12, rel=1e-12)
    alike = RIGHT[loss][1]
    assert (found is None) == alike
    if not alike:
        assert weighted(losses, None, {}) != pytest.approx(together, abs=1e-5), "equal weights would have done"


@pytest.mark.parametrize("first", [whole, padded])
@pytest.mark.parametrize(
    "loss", [labelled_and_by_sample, contrastive, by_class, masked_by_chance], ids=lambda loss: loss.__name__
)
def test_what_no_rule_fits_is_refused(loss: Callable[..., Tensor], first: Callable[[], dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"test: two micro-batches .* together, but .*microbatch_weight=.*GPipe.*"):
        learnt(loss, first(), zero_head=loss is labelled_and_by_sample)


def test_what_samples_draw_is_theirs() -> None:
    """A step that draws for each sample of its own is a mean over samples like any other."""
    weights, _ = learnt(denoised)
    assert weights.rule == EQUAL


def test_the_rules_words() -> None:
    assert learnt(labelled)[0].rule == Rule((Count("['labels']", "not", -100.0, False),))
    assert learnt(shifted)[0].rule == Rule((Count("['labels']", "not", -100.0, True),))
    assert learnt(summed)[0].rule == ADDED and str(ADDED) == "samples, over which it is a sum"
    assert str(learnt(by_both, whole())[0].rule) == (
        "elements of batch['labels'] that are at least 0 and elements of batch['mask'] that are not 0"
    )


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_the_number_of_micro_batches_does_not_matter(parts: int) -> None:
    assert learnt(labelled, whole(), parts=parts)[0].rule == Rule((Count("['labels']", "not", -100.0, False),))


def test_a_loss_that_is_the_same_for_all_samples_is_refused() -> None:
    """Which of two rules holds cannot be told."""
    with pytest.raises(ValueError, match=r"cannot be found.*microbatch_weight="):
        learnt(lambda logits, batch: logits.sum() * 0 + (batch["labels"] == 7).sum() * 0.0)


def test_a_given_function_says_what_micro_batches_weigh() -> None:
    weights = Weights(lambda part: float((part["labels"] >= 0).sum()), who="test")
    parts = split(batch(), PARTS)
    assert weights.of(parts) == pytest.approx([11 / 45, 9 / 45, 16 / 45, 9 / 45])
    assert Weights(lambda part: 1.0, who="test").of(parts) is None
    nothing = Weights(lambda part: float(part is parts[1]), who="test")
    assert nothing.of(parts) == [0, 1, 0, 0]
    assert all(part is parts[1] for part in nothing.defined(parts, [0.0, 1.0, 0.0, 0.0]))
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"microbatch_weight returned .*>= 0"):
            Weights(lambda part, wrong=wrong: wrong, who="test").of(parts)


def test_weights_of_two_bytes_are_looked_at_in_four() -> None:
    module = type("Module", (Tokenwise,), {"loss": staticmethod(labelled)})().bfloat16()
    stack, weights = Stack(find_stack(module, None, who="test"), who="test"), Weights(who="test")
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in whole().items()}
    weights.learn(UncutLosses(module, stack, lambda b: module.training_step(b, 0), who="test"), given, PARTS)
    weights.agree()
    assert weights.rule == Rule((Count("['labels']", "not", -100.0, False),))
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())


class Strict(Tokenwise):
    """A step that cannot run in evaluation mode, with dropout."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.training:
            raise RuntimeError("training alone")
        return super().training_step(batch, batch_idx)


def test_a_step_that_needs_training_mode_tells_its_rule() -> None:
    weights, module = learnt(labelled, base=Strict)
    assert weights.rule == Rule((Count("['labels']", "not", -100.0, False),))
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
    parts = split(batch(), 8)
    assert Rule((Count("['labels']", "not", -100, True),)).amounts(parts) == [2, 7, 4, 3, 7, 7, 1, 6]
    assert Rule((Count("['labels']", "from", 0, False),)).amounts(parts) == [3, 8, 5, 4, 8, 8, 2, 7]
    assert Rule((Count("['mask']", "sum", 0, False),)).amounts(parts) == [3, 8, 5, 4, 8, 8, 2, 7]
    lengths = [{"n": torch.tensor([3, 2])}, {"n": torch.tensor([1, 1])}]
    assert Rule((Count("['n']", "sum", 0, True),)).amounts(lengths) == [3, 0]
    assert Rule((Count("['other']", "sum", 0, True),)).amounts(lengths) == [0, 0]
    assert EQUAL.amounts(lengths) == [1, 1]


def test_the_logged_loss_has_the_losses_weights() -> None:
    losses = {1: torch.tensor(2.0), 0: torch.tensor(4.0)}
    records = {
        "loss": Record({}, [torch.tensor(2.0), torch.tensor(4.0)]),
        "other": Record({}, [torch.tensor(2.0), torch.tensor(3.0)]),
    }
    assert weighted(losses, [0.25, 0.75], records) == 0.75 * 2 + 0.25 * 4
    assert float(records["loss"].value()) == 2.5 and float(records["other"].value()) == 2.5


def test_ranks_take_the_rule_of_the_first_that_found_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, other = Rule((Count("['labels']", "not", -100, True),)), EQUAL
    told: list[Any] = [(None, None, ""), (rule, None, ""), (other, None, "")]
    monkeypatch.setattr(dist, "get_world_size", lambda: len(told))
    monkeypatch.setattr(dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), told))
    weights = Weights(who="test")
    weights.agree()
    assert weights.rule == rule
    told[2] = (None, "refused elsewhere", "")
    with pytest.raises(ValueError, match="refused elsewhere"):
        weights.agree()


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
