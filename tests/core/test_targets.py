"""Other targets for the loss calls of unchanged steps, each held against plain steps on those targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff._core._samples.technique import _by_sample
from lightning_eff._core._targets.calls import Change, TargetCall, mixed, soft, weighted
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.losses import LossNotVisible
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Technique
from tests.models import loader, make_batch, module, trainer
from tests.runs import MODES, differences, final_state, fit

B, T, C, D = 6, 5, 4, 3
LAMBDA = 0.7


class OtherTargets(Technique):
    """Gives the loss calls what a test asks for; without ``others``, labels of the samples in reverse order."""

    saves = "nothing"
    paper = "none"

    def __init__(
        self,
        change: Change | None = None,
        *,
        others: Callable[[Tensor], list[Tensor]] | None = lambda y: [y.flip(0)],
        labels: list[str | int] | None = None,
        stage: Stage = Stage.TRANSFORM,
    ) -> None:
        self.change = mixed(LAMBDA, 1 - LAMBDA) if change is None else change
        self.others, self.labels, self.stage = others, labels, stage
        self.found: list[str] = []
        self.calls = 0

    def attach(self, session: Any) -> None:
        self.targets = Targets(session, "OtherTargets", self.labels)
        session.chain.add(self.stage, self._link)

    def _link(self, step: Any, batch: Any, proceed: Any) -> Any:
        labels = self.targets.labels(step, batch)
        self.found = list(labels)
        others = None if self.others is None else {path: self.others(y) for path, y in labels.items()}
        return self.targets.run(step, batch, proceed, self._count, others)

    def _count(self, call: TargetCall) -> Tensor:
        self.calls += 1
        return self.change(call)


class Probe(pl.LightningModule):
    """A linear net whose step is a function of (logits, batch, module); it keeps the last loss and gradient."""

    def __init__(self, step: Callable[..., Any], classes: int = C, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net, self.table = nn.Linear(D, classes), nn.Embedding(C, D)
        self.step = step
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(self.net(batch[0] if isinstance(batch, tuple | list) else batch["x"]), batch, self)
        if isinstance(loss, Tensor):
            self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1].flatten()))

    def on_after_backward(self) -> None:
        self.gradient = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, ignore: float = 0.0, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, C, shape, generator=g)
    return y.masked_fill(torch.rand(shape, generator=g) < ignore, -100)


def one_step(
    step: Callable[..., Any], batch: Any, *techniques: pl.Callback, classes: int = C, steps: int = 1, **kwargs: Any
) -> Probe:
    probe = Probe(step, classes)
    trainer(*techniques, max_steps=steps, **kwargs).fit(probe, DataLoader([batch] * steps, batch_size=None))
    return probe


def check_same(got: Probe, parts: list[tuple[float, Probe]]) -> None:
    """The loss and its gradient are the weighted sums of those of plain runs."""
    assert got.losses[-1] == pytest.approx(sum(w * p.losses[-1] for w, p in parts), rel=2e-6)
    for name, gradient in got.gradient.items():
        expected = torch.stack([w * p.gradient[name] for w, p in parts]).sum(0)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def _hf_shift(z: Tensor, b: Any, m: Probe) -> Tensor:
    """What transformers' ForCausalLMLoss does."""
    labels = F.pad(b[1], (0, 1), value=-100)[..., 1:].contiguous().view(-1).to(z.device)
    return F.cross_entropy(z.float().view(-1, C), labels, ignore_index=-100, reduction="sum") / 7


def _written(z: Tensor, b: Any, m: Probe) -> Tensor:
    y = torch.full_like(b[1], -100)
    y[:, :-1] = b[1][:, 1:].clone()
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def _copied(z: Tensor, b: Any, m: Probe) -> Tensor:
    y = b[1].new_zeros(B, T)
    y[:, 1:].copy_(b[1][:, :-1])
    return F.cross_entropy(z.flatten(0, 1), y.reshape(-1).clamp(min=0))


def _ignored(z: Tensor, b: Any, m: Probe) -> Tensor:
    y = b[1].clone()
    y[y == 1] = -100
    rows = F.cross_entropy(z.transpose(1, 2), y.masked_fill(y.eq(2), -100), reduction="none")
    return rows.sum() / rows.numel()


def _loop(z: Tensor, b: Any, m: Probe) -> Tensor:
    return torch.stack([F.cross_entropy(zi, yi) for zi, yi in zip(z, b[1], strict=True)]).mean()


def _joined(z: Tensor, b: Any, m: Probe) -> Tensor:
    first, last = b[1].T.split([2, T - 2])
    y = torch.cat([last, first, torch.full((1, B), -100)]).roll(2, 0)[1:]
    return nn.CrossEntropyLoss()(z.transpose(0, 1).flatten(0, 1), y.flatten())


def _smoothed(z: Tensor, b: Any, m: Probe) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0])
    y = torch.stack(b[1].unbind(1), dim=1)
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=weight, label_smoothing=0.2)


def _sorted_away(z: Tensor, b: Any, m: Probe) -> Tensor:
    index = torch.arange(T - 1, -1, -1)
    y = b[1].index_select(1, index).gather(1, torch.zeros(B, T, dtype=torch.long) + index)
    return F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten())


def _one_hot(z: Tensor, b: Any, m: Probe) -> Tensor:
    codes = F.one_hot(b[1].clamp(min=0), C).float() * 0.9 + 0.1 / C
    return F.binary_cross_entropy_with_logits(z, codes, pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))


def _probabilities(z: Tensor, b: Any, m: Probe) -> Tensor:
    codes = F.one_hot(b[1].clamp(min=0), C).float()
    return F.cross_entropy(z.flatten(0, 1), codes.flatten(0, 1))


def _binary(z: Tensor, b: Any, m: Probe) -> Tensor:
    return F.binary_cross_entropy(z[..., 0].sigmoid(), (b[1] > 1).float())


def _accuracy_beside(z: Tensor, b: Any, m: Probe) -> Tensor:
    m.log("accuracy", (z.argmax(-1) == b[1]).float().mean())
    m.log("error", torch.nn.functional.mse_loss(z.detach()[..., 0], b[1].float()))
    mask = (b[1] != -100).float()
    loss = F.cross_entropy(z.transpose(1, 2), b[1], reduction="none")
    return (loss * mask).sum() / (B * T)


STEPS = {f.__name__[1:]: f for f in (
    _hf_shift, _written, _copied, _ignored, _loop, _joined, _smoothed, _sorted_away, _one_hot, _probabilities, _binary,
    _accuracy_beside,
)}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_second_targets_are_those_that_the_step_would_have_made(name: str) -> None:
    """``lambda L(y1) + (1 - lambda) L(y2)``, with its gradient, from one forward pass, whatever the step makes of labels."""
    ignore = 0.0 if name in ("loop", "copied") else 0.3
    x, y = draw(B, T, D), classes(B, T, ignore=ignore)
    if name == "accuracy_beside":  # the step's own mask is that of its own labels
        y[:, 1], y[:, 0], y[:, 2:] = -100, 0, y[:, 2:].clamp(min=0)
    technique = OtherTargets()
    got = one_step(STEPS[name], (x, y), technique)
    assert technique.found == ["[1]"]
    assert technique.calls == (T if name == "none" else B if name == "loop" else 1)
    plain, second = one_step(STEPS[name], (x, y)), one_step(STEPS[name], (x, y.flip(0)))
    assert abs(plain.losses[0] - second.losses[0]) > 1e-4
    check_same(got, [(LAMBDA, plain), (1 - LAMBDA, second)])


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("swapped", [False, True])
def test_regression(loss: Callable[..., Tensor], swapped: bool) -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        y = (b[1] - 0.5) / 2
        return loss(y, z) if swapped else loss(z, y)

    x, y = draw(B, D), draw(B, C, seed=1)
    got = one_step(step, (x, y), OtherTargets())
    check_same(got, [(LAMBDA, one_step(step, (x, y))), (1 - LAMBDA, one_step(step, (x, y.flip(0))))])


@pytest.mark.parametrize("name", ["hf_shift", "written", "ignored", "loop", "one_hot", "joined"])
def test_a_weight_for_each_sample(name: str) -> None:
    """Against plain steps in which all samples but one have the first or the second labels of that sample ignored."""
    weights = torch.linspace(0, 1, B)
    x, y = draw(B, T, D), classes(B, T)

    def by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
        total = torch.zeros(())
        for labels, share in ((b[1], weights), (b[1].flip(0), 1 - weights)):
            for i in range(B):
                others = torch.stack([z[i] if j == i else z[j].detach() for j in range(B)])
                value = STEPS[name](others, (b[0], labels), m)
                still = STEPS[name](z.detach(), (b[0], labels), m)
                total = total + share[i] * (value - still.detach())
        return total

    got = one_step(STEPS[name], (x, y), OtherTargets(mixed(weights, 1 - weights)))
    expected = one_step(by_hand, (x, y))
    for key in ("net.weight", "net.bias"):
        torch.testing.assert_close(got.gradient[key], expected.gradient[key], rtol=1e-4, atol=1e-6)


def test_labels_in_a_list_belong_to_the_sample_of_their_item() -> None:
    """A detector's objects: each image has as many as there are images, so their rows could be taken for images."""
    x, labels = draw(3, D), [classes(3, seed=i) for i in range(3)]
    seen: list[tuple[Tensor, Tensor]] = []

    def step(z: Tensor, batch: Any, module: Probe) -> Tensor:
        return torch.stack([F.cross_entropy(z[i].expand(3, -1), y) for i, y in enumerate(batch[1])]).mean()

    def note(call: TargetCall) -> Tensor:
        seen.append(_by_sample(call, 3))
        return call.plain()

    batch = (x, [{"labels": y, "boxes": torch.zeros(2 + i, 4)} for i, y in enumerate(labels)])

    def of_objects(z: Tensor, batch: Any, module: Probe) -> Tensor:
        return step(z, (batch[0], [one["labels"] for one in batch[1]]), module)

    probe = one_step(of_objects, batch, OtherTargets(change=note, others=None))
    with torch.no_grad():
        z = probe.net(x)
        expected = torch.stack([F.cross_entropy(z[i].expand(3, -1), y, reduction="sum") for i, y in enumerate(labels)])
    losses, counts = (torch.stack(parts).sum(0) for parts in zip(*seen[-3:], strict=True))
    torch.testing.assert_close(losses, expected)
    assert counts.tolist() == [3, 3, 3]
    assert [counted.nonzero().flatten().tolist() for _, counted in seen[-3:]] == [[0], [1], [2]]


@pytest.mark.parametrize("name", ["hf_shift", "written", "smoothed", "ignored", "one_hot", "probabilities", "joined"])
def test_soft_targets_that_are_one_hot_are_the_plain_loss(name: str) -> None:
    x, y = draw(B, T, D), classes(B, T, ignore=0.3)
    hard = F.one_hot(y.clamp(min=0), C).float()
    hard = hard * 0.9 + 0.1 / C if name == "one_hot" else hard
    for weight in (1.0, 0.4, torch.linspace(0, 1, B)):
        got = one_step(STEPS[name], (x, y), OtherTargets(soft(hard, weight), others=None))
        check_same(got, [(1.0, one_step(STEPS[name], (x, y)))])


def test_distillation() -> None:
    """``(1 - w) CE(y) + w CE(p)`` with a teacher's probabilities, shifts and ignored labels by hand."""
    x, y, teacher = draw(B, T, D), classes(B, T, ignore=0.3), draw(B, T, C, seed=3).softmax(-1)

    def by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
        valid = b[1][:, 1:] != -100
        cross = -(teacher[:, 1:] * z[:, :-1].log_softmax(-1)).sum(-1)[valid].mean()
        return 0.25 * F.cross_entropy(z[:, :-1][valid], b[1][:, 1:][valid]) + 0.75 * cross

    got = one_step(_written, (x, y), OtherTargets(soft(teacher, 0.75), others=None))
    check_same(got, [(1.0, one_step(by_hand, (x, y)))])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tokens_that_are_chosen_by_their_losses(reduction: str) -> None:
    """The half of a batch's tokens with the largest losses, as RHO-1 trains on."""

    def largest(losses: Tensor, call: TargetCall) -> Tensor:
        valid = call.valid.sum()
        return (losses >= losses[call.valid].sort(descending=True).values[valid // 2 - 1]).float() * call.valid

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), b[1].flatten(), reduction=reduction).sum()

    def by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
        rows = F.cross_entropy(z.flatten(0, 1), b[1].flatten(), reduction="none")
        top = rows.topk(int((b[1] != -100).sum()) // 2).values
        return top.mean() if reduction == "mean" else top.sum()

    x, y = draw(B, T, D), classes(B, T, ignore=0.3)
    got = one_step(step, (x, y), OtherTargets(weighted(largest), others=None))
    check_same(got, [(1.0, one_step(by_hand, (x, y)))])


def test_weights_of_labels_reach_their_tokens() -> None:
    """A weight for each token, at its place after transformers' shift."""
    x, y, w = draw(B, T, D), classes(B, T, ignore=0.3), draw(B, T, seed=4).abs()

    def by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
        rows = F.cross_entropy(z[:, :-1].transpose(1, 2), b[1][:, 1:], reduction="none")
        return (rows * w[:, 1:]).sum() / 7

    change = weighted(lambda losses, call: call.at_elements(w, fill=0.0))
    got = one_step(_hf_shift, (x, y), OtherTargets(change, others=None))
    check_same(got, [(1.0, one_step(by_hand, (x, y)))])


# -- which calls are meant


def test_an_auxiliary_loss_is_left_alone() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        own = F.cross_entropy(z, z.detach().argmax(-1))
        again = F.mse_loss(m.table.weight[: D + 1] @ z[0, :D], torch.zeros(D + 1))
        rebuilt = F.mse_loss(z[:, :D], b[0])
        return F.cross_entropy(z, b[1]) + 0.1 * own + 0.3 * again + 0.2 * rebuilt

    x, y = draw(B, D), classes(B)
    technique = OtherTargets()
    got = one_step(step, (x, y), technique)
    assert technique.found == ["[1]"] and technique.calls == 1
    check_same(got, [(LAMBDA, one_step(step, (x, y))), (1 - LAMBDA, one_step(step, (x, y.flip(0))))])


def test_targets_that_only_look_like_labels_are_left_alone() -> None:
    """Pseudo-labels of the labels' type, or masked by them, are of the network; classes made of labels are labels."""

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        own = z.detach().argmax(-1).int().type_as(b[1])
        masked = torch.where(b[1] == 2, -100, own.masked_fill(b[1] == 1, -100))
        loss = F.cross_entropy(z, own.to(b[1])) + F.cross_entropy(z, masked)
        return F.binary_cross_entropy_with_logits(z[:, 0], torch.where(b[1] > 1, 1.0, 0.0)) + 0.5 * loss

    x, y = draw(B, D), classes(B)
    technique = OtherTargets()
    got = one_step(step, (x, y), technique)
    assert technique.calls == 1

    def only(z: Tensor, b: Any, m: Probe) -> Tensor:
        return (
            step(z, (b[0], y), m)
            - F.binary_cross_entropy_with_logits(z[:, 0], torch.where(y > 1, 1.0, 0.0))
            + F.binary_cross_entropy_with_logits(z[:, 0], torch.where(b[1] > 1, 1.0, 0.0))
        )

    check_same(got, [(LAMBDA, one_step(only, (x, y))), (1 - LAMBDA, one_step(only, (x, y.flip(0))))])


def test_all_calls_on_labels_are_meant() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z, b["y"]) + 0.5 * F.cross_entropy(z * 2, b["other"])

    x, y, other = draw(B, D), classes(B), classes(B, seed=1)
    batch, flipped = {"x": x, "y": y, "other": other}, {"x": x, "y": y.flip(0), "other": other.flip(0)}
    technique = OtherTargets()
    got = one_step(step, batch, technique)
    assert technique.found == ["['y']", "['other']"] and technique.calls == 2
    check_same(got, [(LAMBDA, one_step(step, batch)), (1 - LAMBDA, one_step(step, flipped))])
    technique = OtherTargets(labels=["other"])
    got = one_step(step, batch, technique)
    assert technique.found == ["['other']"] and technique.calls == 1
    check_same(got, [(LAMBDA, one_step(step, batch)), (1 - LAMBDA, one_step(step, {**batch, "other": other.flip(0)}))])
    hard = {f"['{key}']": F.one_hot(batch[key].flip(0), C).float() for key in ("y", "other")}
    got = one_step(step, batch, OtherTargets(lambda call: soft(hard[call.label])(call), others=None))
    check_same(got, [(1.0, one_step(step, flipped))])


def test_one_tensor_that_is_input_and_labels() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        ids = b[0]
        return F.cross_entropy((m.table(ids[:, :-1]) @ m.table.weight.T).flatten(0, 1), ids[:, 1:].flatten())

    class Ids(Probe):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step(None, batch, self)
            self.losses.append(loss.item())
            return loss

    y = classes(B, T)
    other = classes(B, T, seed=1)
    got, plain = Ids(step), Ids(step)
    data = DataLoader([(y,)], batch_size=None)
    trainer(OtherTargets(others=lambda y: [other]), max_steps=1).fit(got, data)
    trainer(max_steps=1).fit(plain, data)

    def second(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy((m.table(y[:, :-1]) @ m.table.weight.T).flatten(0, 1), other[:, 1:].flatten())

    mixed_in = Ids(second)
    trainer(max_steps=1).fit(mixed_in, data)
    check_same(got, [(LAMBDA, plain), (1 - LAMBDA, mixed_in)])


def test_entries_that_stand_for_no_label_keep_their_own_target() -> None:
    """A class that the step pads with is nobody's label: neither weights nor soft targets of samples reach it."""

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), F.pad(b[1], (0, 1), value=1)[:, 1:].flatten(), reduction="sum")

    def by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
        rows = F.cross_entropy(z.transpose(1, 2), F.pad(b[1], (0, 1), value=1)[:, 1:], reduction="none")
        return rows[:, -1].sum()

    x, y = draw(B, T, D), classes(B, T)
    for change in (mixed(torch.zeros(B), torch.zeros(B)), soft(torch.zeros(B, T, C))):
        got = one_step(
            step, (x, y), OtherTargets(change, others=None if change.__qualname__[0] == "s" else lambda y: [y])
        )
        check_same(got, [(1.0, one_step(by_hand, (x, y)))])


def test_labels_that_weigh_their_own_loss_are_no_other_loss() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return (F.cross_entropy(z, b[1], reduction="none") * (1.0 + b[1])).mean()

    assert one_step(step, (draw(B, D), classes(B)), OtherTargets()).losses


def test_what_cannot_be_told_is_an_error() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.mse_loss(z, b["y"]) + F.mse_loss(z[:, :D], b["x"])

    batch = {"x": draw(B, D), "y": draw(B, C, seed=1)}
    with pytest.raises(ValueError, match=r"several tensors.*\['y'\] \(F.mse_loss\), \['x'\] \(F.mse_loss\).*labels="):
        one_step(step, batch, OtherTargets())
    technique = OtherTargets(labels=["y"])
    got = one_step(step, batch, technique)
    assert technique.found == ["['y']"]
    second = {**batch, "y": batch["y"].flip(0)}
    check_same(got, [(LAMBDA, one_step(step, batch)), (1 - LAMBDA, one_step(step, second))])
    with pytest.raises(ValueError, match=r"labels=\['z'\]\): \['z'\] became no target .* \['y'\] \(F.mse_loss\)"):
        one_step(step, batch, OtherTargets(labels=["z"]))
    with pytest.raises(ValueError, match=r"other labels of shape \(2,\) for .*expected .*\(6, 4\)"):
        one_step(step, batch, OtherTargets(labels=["y"], others=lambda y: [y.new_zeros(2)]))
    with pytest.raises(ValueError, match=r"values of shape \(5,\) .* expected \(6,\), one per sample, or \(6, 4\)"):
        one_step(step, batch, OtherTargets(mixed(torch.ones(5), torch.ones(5)), labels=["y"]))
    with pytest.raises(
        ValueError, match=r"soft targets of shape \(6, 3\) .* expected \(6, 4\), the classes in the last"
    ):
        hard = soft(torch.ones(B, 3))
        one_step(
            lambda z, b, m: F.cross_entropy(z, b[1]),
            (draw(B, D), classes(B).clamp(max=2)),
            OtherTargets(hard, others=None),
        )
    assert not _get_current_function_mode_stack()


# -- what cannot be seen


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(z)
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0], None


def _by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
    return -z.log_softmax(-1).gather(1, b[1].unsqueeze(1)).mean()


def _half_by_hand(z: Tensor, b: Any, m: Probe) -> Tensor:
    return F.cross_entropy(z, b[1]) - z.log_softmax(-1)[torch.arange(B), b[1]].mean()


def _focal(z: Tensor, b: Any, m: Probe) -> Tensor:
    m.log("ce", F.cross_entropy(z, b[1]))
    codes = F.one_hot(b[1], C)
    return -(codes * (1 - z.softmax(-1)) * z.log_softmax(-1)).sum(-1).mean()


def _from_elsewhere(z: Tensor, b: Any, m: Probe) -> Tensor:
    return F.cross_entropy(z, torch.zeros(B, dtype=torch.long))


def _compiled(z: Tensor, b: Any, m: Probe) -> Tensor:
    if not hasattr(m, "criterion"):
        m.criterion = torch.compile(nn.CrossEntropyLoss(), backend="aot_eager")
    return m.criterion(z, b[1])


def _reentrant(z: Tensor, b: Any, m: Probe) -> Tensor:
    return checkpoint(F.cross_entropy, z, b[1], use_reentrant=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_by_hand, r"no loss call .* \(none was called\).*Compute it by one of these functions"),
        (_half_by_hand, "labels .1. come into the loss by torch's 'getitem'"),
        (_focal, "called F.cross_entropy on the labels, but the loss that it returned does not come of it"),
        (_from_elsewhere, r"seen were F.cross_entropy, whose targets come from elsewhere"),
        (
            lambda z, b, m: Own.apply(z, b[1]),
            "seen were F.cross_entropy without a gradient, as in .* an autograd function",
        ),
        (_compiled, "none was called.*Compiled here: criterion"),
        (_reentrant, "use_reentrant=False can be seen"),
    ],
)
def test_a_loss_that_cannot_be_seen_is_an_error(step: Any, message: str) -> None:
    with pytest.raises(LossNotVisible, match=f"OtherTargets: .*{message}"):
        one_step(step, (draw(B, D), classes(B)), OtherTargets())
    assert not _get_current_function_mode_stack()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_later_step_without_a_loss_that_can_be_seen_is_an_error() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor | None:
        if m.global_step == 1:
            return None if not m.losses[1:] else F.cross_entropy(z, b[1])
        return F.cross_entropy(z, b[1]) if m.global_step < 3 else _by_hand(z, b, m)

    with pytest.raises(LossNotVisible, match="no loss call of training_step was seen"):
        one_step(step, (draw(B, D), classes(B)), OtherTargets(), steps=6)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_is_skipped_is_no_error() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor | None:
        m.seen = getattr(m, "seen", 0) + 1  # what a look counts is put back
        return None if m.seen in (1, 3) else F.cross_entropy(z, b[1])

    technique = OtherTargets(labels=[1])
    technique.calls = 0
    probe = one_step(step, (draw(B, D), classes(B)), technique, steps=5)
    assert len(probe.losses) == technique.calls == 3


# -- where it acts


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_hugging_face(name: str) -> None:
    """Losses that shift, ignore and are divided by ``num_items_in_batch``, of whole models."""
    batch = make_batch(name)
    if name == "vit":
        batch["labels"] = torch.arange(4)
    if name in ("gpt2", "llama"):
        batch["labels"][1, 5:] = -100
        batch["num_items_in_batch"] = torch.tensor(50)
    gradients = []
    for flipped, techniques in ((False, [OtherTargets()]), (False, []), (True, [])):
        torch.manual_seed(0)
        net = module(name)
        data = {**batch, "labels": batch["labels"].flip(0)} if flipped else batch
        if name == "t5" and flipped:  # what the decoder reads is not the loss's target
            data = {**data, "decoder_input_ids": net.model._shift_right(batch["labels"])}  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        keep = Keep()
        trainer(*techniques, keep, max_steps=1).fit(net, DataLoader([data], batch_size=None))
        gradients.append(keep.gradient)
    got, plain, second = gradients
    assert not torch.allclose(plain, second, rtol=1e-2)
    torch.testing.assert_close(got, LAMBDA * plain + (1 - LAMBDA) * second, rtol=1e-4, atol=1e-6)


class Keep(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.gradient = torch.cat([p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None])


def test_gradient_checkpointing_runs_the_changed_loss_again() -> None:
    def plainly(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.tanh(), y)

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return checkpoint(plainly, z, b[1], use_reentrant=False)

    x, y = draw(B, D), classes(B)
    technique = OtherTargets(mixed(torch.linspace(0, 1, B), torch.linspace(1, 0, B)))
    got = one_step(step, (x, y), technique)
    assert technique.calls == 2
    expected = one_step(lambda z, b, m: plainly(z, b[1]), (x, y), OtherTargets(technique.change))
    check_same(got, [(1.0, expected)])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_around_a_compiled_network() -> None:
    """The network stays compiled, the loss outside of it is seen, and the labels in it are not."""
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        if "compiled" not in m.__dict__:
            m.__dict__["compiled"] = torch.compile(nn.Sequential(m.net, nn.Tanh()), backend=backend, fullgraph=True)
        return F.cross_entropy(m.compiled(b[0]), b[1])

    x, y = draw(B, D), classes(B)
    got = one_step(step, (x, y), OtherTargets(), steps=4)
    assert 1 <= len(made) <= 2  # with a gradient and without
    torch.compiler.reset()
    check_same(got, [(LAMBDA, one_step(step, (x, y))), (1 - LAMBDA, one_step(step, (x, y.flip(0))))])


def test_validation_and_what_comes_after_are_plain() -> None:
    """Validation within the run sees its own targets; afterwards, also after an exception, torch is as before."""
    x, y = draw(B, D), classes(B)
    technique = OtherTargets()
    probe = Probe(lambda z, b, m: F.cross_entropy(z, b[1]))
    t = trainer(technique, max_steps=2, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1)
    data = DataLoader([(x, y)], batch_size=None)
    t.fit(probe, data, data)
    assert t.callback_metrics["val"].item() == pytest.approx(F.cross_entropy(probe.net(x), y).item())
    assert technique.calls == 2
    assert not _get_current_function_mode_stack()

    class Fails(pl.Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="in the middle"):
        one_step(probe.step, (x, y), OtherTargets(), Fails())
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("mode", ["accumulate_clip", "bf16"])
def test_modes(mode: str) -> None:
    """Under accumulation, clipping and bf16 the run is that of a module which mixes by itself."""

    class ByHand(type(module("classifier"))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self(batch[0])
            return LAMBDA * F.cross_entropy(z, batch[1]) + (1 - LAMBDA) * F.cross_entropy(z, batch[1].flip(0))

    finals = []
    for cls, techniques in ((type(module("classifier")), [OtherTargets()]), (ByHand, [])):
        torch.manual_seed(0)
        net = cls()
        t = trainer(*techniques, max_steps=4, **MODES[mode])
        torch.manual_seed(1)
        t.fit(net, loader("classifier", shuffle=False))
        finals.append(dict(net.state_dict().items()))
    for name, value in finals[0].items():
        torch.testing.assert_close(value, finals[1][name], rtol=1e-5, atol=1e-6)


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    def build() -> list[Technique]:
        return [OtherTargets(mixed(torch.tensor([0.1, 0.5, 0.7, 1.0]), torch.tensor([0.9, 0.5, 0.3, 0.0])))]

    whole = final_state(*fit("gpt2", build, directory=tmp_path))
    plain = final_state(*fit("gpt2", list))
    assert differences(whole, plain)
    resumed = final_state(*fit("gpt2", build, resume=next(tmp_path.glob("step=7*.ckpt"))))
    assert differences(whole, resumed) == []


def test_with_techniques_that_look_at_losses_or_run_the_step_twice() -> None:
    """SAM's two passes are both mixed; scores of selective backprop are of the mixed losses."""
    x, y = draw(B, D), classes(B)
    technique = OtherTargets()
    one_step(lambda z, b, m: F.cross_entropy(z, b[1]), (x, y), technique, eff.SharpnessAwareMinimization(rho=0.1))
    assert technique.calls == 2
    keep = eff.SelectiveBackprop(keep=0.5, history=16)
    technique = OtherTargets()
    one_step(lambda z, b, m: F.cross_entropy(z, b[1]), (x, y), technique, keep, steps=3)
    assert technique.calls > 3


class Looks(Technique):
    """Runs the step for its loss alone within each training pass, as a technique that chooses tokens does."""

    saves = "nothing"
    paper = "none"

    def __init__(self, *, gradient: bool) -> None:
        self.gradient = gradient
        self.read: list[float] = []

    def attach(self, session: Any) -> None:
        session.chain.add(Stage.MEASURE, self._link)

    def _link(self, step: Any, batch: Any, proceed: Any) -> Any:
        def around(run: Any, batch: Any) -> Any:
            with torch.set_grad_enabled(self.gradient):
                return run(batch)

        self.read.append(step.forward_only(batch, B, around, transform=False).item())
        return proceed(batch)


@pytest.mark.parametrize("gradient", [False, True])
def test_passes_that_only_look_see_the_plain_step(gradient: bool) -> None:
    """They are neither changed nor told of; what is trained on is changed once."""

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z, b[1])

    batch = draw(B, D), classes(B)
    technique, looks = OtherTargets(stage=Stage.REWEIGHT), Looks(gradient=gradient)
    got, plain = one_step(step, batch, technique, looks), one_step(step, batch)
    assert technique.calls == 1 and not technique.targets.compared
    assert looks.read == pytest.approx(plain.losses)
    other = one_step(step, (batch[0], batch[1].flip(0)))
    check_same(got, [(LAMBDA, plain), (1 - LAMBDA, other)])


@pytest.mark.parametrize("sam", [eff.SharpnessAwareMinimization, eff.LookSAM])
def test_each_pass_of_sam_is_changed_once(sam: Any) -> None:
    """A change within its two passes gives what SAM makes of a step that has the changed loss."""

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z, b[1])

    batch = draw(B, D), classes(B)
    twice = OtherTargets(lambda call: 2 * call.plain(), others=None, stage=Stage.REWEIGHT)
    got = one_step(step, batch, sam(rho=0.5), twice)
    check_same(got, [(1.0, one_step(lambda z, b, m: 2 * step(z, b, m), batch, sam(rho=0.5)))])
    assert twice.calls == 2


def test_two_changes_wrap_each_other() -> None:
    """The inner one's labels go through the outer one's change: smoothing within mixing is mixing of the smoothed."""

    class Smoothing(OtherTargets):
        pass

    def smooth(call: TargetCall) -> Tensor:
        return call.fn(**{**call.arguments, "label_smoothing": 0.2})

    x, y = draw(B, D), classes(B)
    got = one_step(
        lambda z, b, m: F.cross_entropy(z, b[1]), (x, y), OtherTargets(), Smoothing(smooth, others=None, stage=Stage.REWEIGHT)
    )  # fmt: skip

    def smoothed(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z, b[1], label_smoothing=0.2)

    check_same(got, [(LAMBDA, one_step(smoothed, (x, y))), (1 - LAMBDA, one_step(smoothed, (x, y.flip(0))))])
