"""Loss-biased importance sampling: unbiased with k = 1, hard samples heavier below, and its errors."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff.data.selection import loss_biased_sampling
from lightning_eff.data.selection.loss_biased_sampling import LossBiasedSampling, biased_weights
from tests.cases import Case, own_loss
from tests.data.selection.test_selective_backprop import Gradients, gradient, still
from tests.models import TinyClassifier, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "LossBiasedSampling": Case(
        active=lambda: LossBiasedSampling(presample=2.0),
        neutral=lambda: LossBiasedSampling(start=1.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}

B = 4


def every_draw(monkeypatch: pytest.MonkeyPatch, b: int) -> list[tuple[int, ...]]:
    """Let the draws of a run be all those of ``b`` of the samples, in turn."""
    draws = [*product(range(B), repeat=b)]
    coming = iter(draws)
    monkeypatch.setattr(loss_biased_sampling, "draw", lambda p, b, generator: torch.tensor(next(coming)))
    return draws


def each_sample(net: Any, name: str, batch: Any) -> tuple[Tensor, list[Tensor]]:
    """``l_i``, whose mean is the step's loss, and their gradients, one by one."""
    if name == "classifier":
        losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
    elif name == "vit":
        losses = F.cross_entropy(net.model(batch["pixel_values"]).logits, batch["labels"], reduction="none")
    else:
        z = net(batch["input_ids"])
        tokens = F.cross_entropy(z.flatten(0, 1), batch["labels"].flatten(), reduction="none").reshape(B, -1)
        losses = tokens.sum(1) * B / (batch["labels"] != -100).sum()
    grads = [torch.autograd.grad(loss, [*net.parameters()], retain_graph=True) for loss in losses]
    return losses.detach().double(), [torch.cat([g.flatten() for g in found]).double() for found in grads]


@pytest.mark.parametrize(("name", "k"), [("classifier", 1.0), ("classifier", 0.5), ("tiny_gpt", 1.0), ("vit", 0.5)])
def test_mean_over_all_draws(name: str, k: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of four samples: with k = 1 the whole batch's gradient, with less the one by hand, which hard samples lead."""
    net, batch = still(name), make_batch(name, B, length=12)
    if name == "tiny_gpt":
        batch = {**batch, "labels": batch["labels"].clone()}
        for i in range(B):
            batch["labels"][i, 3 + 2 * i :] = -100
    losses, grads = each_sample(net, name, batch)
    full, p = torch.stack(grads).mean(0), losses / losses.sum()
    draws = every_draw(monkeypatch, 2)
    gradients = Gradients()
    net.lr = 0.0
    data = DataLoader([batch] * len(draws), batch_size=None)
    trainer(LossBiasedSampling(presample=2.0, k=k), gradients, max_steps=len(draws)).fit(net, data)
    mean, expected, shares = torch.zeros_like(full), torch.zeros_like(full), torch.zeros(B).double()
    for (i, j), found in zip(draws, gradients.found, strict=True):
        mean += p[i] * p[j] * found
        raw = [(B * p[i]) ** -k, (B * p[j]) ** -k]
        whole = losses[i] / (B * p[i]) + losses[j] / (B * p[j])
        scale = whole / (raw[0] * losses[i] + raw[1] * losses[j])
        for at, w in ((i, raw[0]), (j, raw[1])):
            expected += p[i] * p[j] * w * scale * grads[at] / 2
            shares[at] += p[i] * p[j] * w * scale / 2
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-6)
    if k == 1:
        torch.testing.assert_close(mean, full, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shares, torch.full((B,), 1 / B).double())
    else:
        assert shares[losses.argmax()] > 1 / B > shares[losses.argmin()]
        assert (mean - full).norm() > 1e-3 * full.norm()


def test_the_mean_of_1500_draws_is_the_whole_gradient() -> None:
    """By the rule and its own draws: within 4.5 standard errors in each weight's direction taken together."""
    net, batch = still("classifier"), make_batch("classifier", B)
    losses, grads = each_sample(net, "classifier", batch)
    p, full = losses / losses.sum(), torch.stack(grads).mean(0)
    index = loss_biased_sampling.draw(p, 1500, torch.Generator().manual_seed(0))
    w = biased_weights(p[index], losses[index], size=B, k=1.0)
    drawn = w[:, None] * torch.stack(grads)[index]
    error = (drawn.mean(0) - full).norm()
    assert error < 2 * drawn.var(0).sum().sqrt() / math.sqrt(1500)
    assert error < 0.1 * full.norm()


def test_weights_sum_as_the_unbiased_ones_and_favour_hard_samples() -> None:
    losses = torch.tensor([0.1, 0.5, 2.0]).double()
    p = losses / losses.sum()
    unbiased = 1 / (3 * p)
    for k in (0.0, 0.5, 1.0):
        w = biased_weights(p, losses, size=3, k=k)
        torch.testing.assert_close((w * losses).sum(), (unbiased * losses).sum())
        torch.testing.assert_close(w[0] / w[2], (p[0] / p[2]) ** -k)
    assert biased_weights(torch.tensor([0.5, 0.5]), torch.zeros(2), size=2, k=0.5).tolist() == [1, 1]


def test_draws_are_the_runs_own_and_begin_when_told() -> None:
    class Sees(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((self.global_step, len(batch[0]), torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

    seen: list[Any] = []
    technique = LossBiasedSampling(presample=2.0, start=0.5)
    trainer(technique, max_steps=4).fit(Sees(), loader("classifier"))
    assert [(step, n) for step, n, grad in seen if grad] == [(0, 4), (1, 4), (2, 2), (3, 2)]
    assert {step for step, _, grad in seen if not grad} == {0, 2, 3}, "the first step looks at what is scored later"
    assert technique.report() == {"active": 1, "fraction": 0.5}


def test_sample_loss_is_what_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(net: Any, batch: Any) -> Tensor:
        return torch.logsumexp(net(batch[0]), dim=1)

    net, batch = still("classifier"), make_batch("classifier", B)
    monkeypatch.setattr(loss_biased_sampling, "draw", lambda p, b, generator: torch.tensor([2, 0]))
    found = gradient(net, batch, LossBiasedSampling(presample=2.0, k=0.0, sample_loss=told))
    losses = told(net, batch)
    w = biased_weights((losses / losses.sum())[[2, 0]], losses[[2, 0]], size=B, k=0.0).detach()
    expected = torch.autograd.grad((w * losses[[2, 0]]).mean(), [*net.parameters()])
    torch.testing.assert_close(
        found.double(), torch.cat([g.flatten() for g in expected]).double(), rtol=1e-5, atol=1e-7
    )


def test_a_negative_loss_is_refused() -> None:
    def told(net: Any, batch: Any) -> Tensor:
        return torch.logsumexp(net(batch[0]), dim=1) - torch.tensor([0.0, 9.0, 0.0, 9.0])

    t = trainer(LossBiasedSampling(sample_loss=told), max_steps=2)
    with pytest.raises(ValueError, match=r"LossBiasedSampling: the loss of sample\(s\) 1, 3 of 4 is negative"):
        t.fit(TinyClassifier(), loader("classifier"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"presample": 1.0}, r"presample=1.0\): expected a finite number > 1"),
        ({"presample": math.inf}, r"presample=inf\)"),
        ({"k": 1.5}, r"k=1.5\): expected a number in \[0, 1\]"),
        ({"k": math.nan}, r"k=nan\)"),
        ({"start": -0.1}, r"start=-0.1\): expected a number in \[0, 1\]: the fraction of the budget"),
        ({"sample_loss": 3}, r"sample_loss=3\): expected a function of \(module, batch\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"LossBiasedSampling\(" + message):
        LossBiasedSampling(**arguments)


def test_a_start_needs_a_budget() -> None:
    t = trainer(LossBiasedSampling(start=0.5), max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"start=0.5\): the Trainer has no end .* or use start=0"):
        t.fit(TinyClassifier(), loader("classifier"))


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LossBiasedSampling", {"presample": 2.0, "k": 1.0}, max_steps=4)
