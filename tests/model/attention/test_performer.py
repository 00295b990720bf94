"""Performer: features whose products are softmax's kernel on average, prefix sums, and masks that it can and cannot read."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff import Performer
from lightning_eff._core import rng
from lightning_eff._core._attention.calls import Call
from lightning_eff.model.attention._replacing.projections import orthogonal_rows
from lightning_eff.model.attention.performer import (
    careful_linear_attention,
    linear_attention,
    log_features,
    positive_features,
)
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, a_call, loss_of, reference, replaced, weights_of
from tests.models import TinyGPT, loader, trainer
from tests.runs import fit_yaml

UNSEEN = "found no attention call in training_step"
CASES = {
    "Performer": Case(
        active=lambda: Performer(features=16, redraw=2),
        neutral=lambda: Performer(features=0),
        lost=(classifier, "classifier", UNSEEN),
        refuses={"classifier": UNSEEN},
    )
}


class Seeded(Performer):
    """Outside of a run."""

    seed = 0  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]


def draws(rows: int, width: int, count: int, *, gaussian: bool = True) -> list[Tensor]:
    return [orthogonal_rows(rows, width, rng.keyed_generator(0, i), gaussian=gaussian).double() for i in range(count)]


def test_products_of_features_are_the_kernel_on_average_and_the_error_falls_as_one_over_m() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (0.2 * torch.randn(20, 8, generator=g, dtype=torch.float64) for _ in range(2))
    kernel = torch.exp(q @ k.T)
    errors: dict[int, float] = {}
    for m in (8, 32, 128):
        found = torch.stack(
            [positive_features(q, w) @ positive_features(k, w).T for w in draws(m, 8, 12_800 // m + 300)]
        )
        spread = found.std(0) / math.sqrt(len(found))
        assert float(((found.mean(0) - kernel) / spread).abs().mean()) < 1.2, "unbiased"
        errors[m] = float((found - kernel).square().mean())
    assert errors[8] / errors[32] == pytest.approx(4, rel=0.25)
    assert errors[32] / errors[128] == pytest.approx(4, rel=0.25)
    rows = torch.stack(draws(8, 8, 1)).squeeze(0)
    products = rows @ rows.T
    assert float((products - products.diag().diag()).abs().max()) < 1e-5, "orthogonal"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_sums_over_keys_are_those_of_each_pair(causal: bool, chunk: int) -> None:
    torch.manual_seed(0)
    fq, fk = (torch.rand(2, 3, 13, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 3, 13, 4, dtype=torch.float64, requires_grad=True)
    pairs = fq @ fk.transpose(-1, -2)
    pairs = pairs.tril() if causal else pairs
    wanted = pairs / pairs.sum(-1, keepdim=True) @ v
    careful = careful_linear_attention(fq.log(), fk.log(), v, causal=causal, chunk=chunk)
    plain = linear_attention(fq, fk, v, causal=causal, chunk=chunk)
    assert plain is not None
    for got in (plain, careful):
        torch.testing.assert_close(got, wanted)
        found, exact = (torch.autograd.grad(t.square().sum(), (fq, fk, v), retain_graph=True) for t in (got, wanted))
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b)


def steep(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float32 whose features underflow if they are scaled by the largest of all keys."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=g) for _ in range(3))
    if kind == "the first keys are far below the others":  # the first rows see no others
        k[:, :, :20] *= 12.0
    elif kind == "each key is far above those before":  # long keys have small features
        k *= torch.linspace(30, 1, 40).view(1, 1, 40, 1)
    else:  # the largest features of queries are others than those of keys
        q, k = 20 + 0.02 * q, -20 + 0.02 * k
    return q, k, v


STEEP = (
    "the first keys are far below the others",
    "each key is far above those before",
    "queries look away from keys",
)


def by_pairs(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, causal: bool) -> Tensor:
    """Each pair's weight by logsumexp."""
    scores = torch.logsumexp(log_features(q, omega)[..., :, None, :] + log_features(k, omega)[..., None, :, :], -1)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", STEEP)
def test_rows_whose_features_underflow_are_right(kind: str, causal: bool) -> None:
    """Against each pair's weight in float64, with gradients; and the plain sums would be wrong there."""
    tensors = [t.requires_grad_() for t in steep(kind)]
    technique = Seeded(features=16)
    call = Call(*tensors, None, 0.0, causal, 1.0)
    omega = technique._omega(8, tensors[0])
    fq, fk = technique._safe(tensors[0], omega, (-1,), None), technique._safe(tensors[1], omega, (-2, -1), None)
    pairs = fq @ fk.mT
    lost = int(((pairs.tril() if causal else pairs).sum(-1) == 0).sum())
    if causal or kind == STEEP[-1]:
        assert lost > 0 and linear_attention(fq, fk, tensors[2], causal=causal) is None
    got = technique.attend(call)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    wanted = by_pairs(*exact, omega.double(), causal)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-3)
    weight = torch.linspace(-1, 1, got.numel()).view(got.shape)
    found = torch.autograd.grad((got * weight).sum(), tensors)
    for a, b in zip(found, torch.autograd.grad((wanted * weight).sum(), exact), strict=True):
        assert a.isfinite().all() and float((a.double() - b).norm() / b.norm()) < 5e-3


def test_hidden_keys_before_steep_ones_do_not_count() -> None:
    """Padding on the left: rows that see nothing are zero, and do not make a call take the long way."""
    q, k, v = steep(STEEP[1])
    there = torch.arange(40) >= 9
    mask = there & torch.ones(40, 40).tril().bool()
    technique = Seeded(features=16)
    got = technique.attend(Call(q, k, v, mask[None, None], 0.0, False, 1.0))
    omega = technique._omega(8, q).double()
    wanted = by_pairs(*(t[:, :, 9:].double() for t in (q, k, v)), omega, True)
    torch.testing.assert_close(got[:, :, 9:].double(), wanted, rtol=0, atol=5e-3)
    assert torch.equal(got[:, :, :9], torch.zeros(1, 2, 9, 8))
    tame = torch.rand(1, 2, 40, 16)
    hidden = tame * there[:, None]
    assert linear_attention(tame, hidden, v, causal=True) is None
    assert linear_attention(tame, hidden, v, causal=True, sees=(there.cumsum(0) > 0)[:, None]) is not None


PADDING = (torch.arange(13) < torch.tensor([[13], [7]]))[:, None, None]
TRIANGLE = torch.ones(13, 13).tril().bool()
CALLS = {
    "plain": a_call(size=0.5),
    "causal": a_call(size=0.5, causal=True),
    "padded": a_call(size=0.5, mask=PADDING),
    "padded by numbers": a_call(size=0.5, mask=torch.zeros(2, 1, 1, 13).masked_fill(~PADDING, -1e38)),
    "causal and padded": a_call(size=0.5, mask=PADDING & TRIANGLE),
    "left padded": a_call(size=0.5, mask=PADDING.flip(-1) & TRIANGLE),
    "biases of keys": a_call(size=0.5, mask=torch.randn(2, 4, 1, 13, dtype=torch.float64)),
    "large": a_call(size=60.0, causal=True),
}


@pytest.mark.parametrize("kind", sorted(CALLS))
def test_with_many_features_it_is_softmax_attention_with_its_masks_and_rows_sum_to_one(kind: str) -> None:
    call = CALLS[kind]
    technique = Seeded(features=4096)
    weights = weights_of(technique.attend, call)
    eye = torch.eye(13, dtype=torch.float64).expand(2, 2, 13, 13)
    wanted = reference(call.query, call.key, eye, call.mask, causal=call.causal, scale=call.scale)
    seen = wanted.sum(-1) > 0
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1)[seen], torch.ones_like(weights.sum(-1)[seen]))
    if kind != "large":
        assert float((weights - wanted)[seen].abs().max()) < 0.05
    there = call.may_see()
    hidden = torch.zeros_like(weights, dtype=torch.bool) if there is None else ~there.expand(weights.shape)
    assert float(weights.masked_fill(~hidden, 0)[seen].abs().max()) == 0.0, "what is hidden has no weight at all"


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "module", "encoder", "causal", "heads in front"])
def test_modules_with_many_features_come_near_to_what_they_were(name: str) -> None:
    """Padded and with grouped queries, causal or not; gradients are finite."""
    net, loss = loss_of(name)
    plain = float(loss().detach())
    with replaced(Seeded(features=2048).attend) as mode:
        found = loss()
        found.backward()
    assert (
        mode.calls >= 2 and float(found.detach()) == pytest.approx(plain, rel=3e-3) and float(found.detach()) != plain
    )
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in net.parameters())


def test_masks_that_say_more_are_refused() -> None:
    bad = (
        a_call(mask=TRIANGLE[None, None] & TRIANGLE.T.roll(3, 0)),
        a_call(mask=torch.randn(1, 4, 13, 13, dtype=torch.float64)),
    )
    for call in bad:
        with replaced(Seeded().attend), pytest.raises(ValueError, match="contains more than padding and causality"):
            call.run()
    with pytest.raises(
        ValueError, match="Performer: a call of attention cannot be replaced: it drops 10% of its weights"
    ):
        trainer(Performer(), max_steps=2).fit(Net("plain", 0.1), loader("tiny_gpt"))
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="causal with other keys"):
        Seeded().attend(Call(q, q[:, :, :3], q[:, :, :3], None, 0.0, True, 0.3))


def test_features_are_drawn_anew_and_are_the_run_s() -> None:
    pl.seed_everything(0, verbose=False)
    technique = Performer(features=16, redraw=2)
    t = trainer(technique, max_steps=5, limit_val_batches=1, check_val_every_n_epoch=None, val_check_interval=1)
    net = TinyGPT(num_layers=2)
    t.fit(net, loader("tiny_gpt"), loader("tiny_gpt", 4))
    assert technique.report() == {"attentions": 2, "features": 16, "draws": 3}
    assert technique.summary() == "2 calls of attention per step by 16 features, drawn 3 times"
    found = [t.validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False) for _ in range(2)]
    plain = trainer(limit_val_batches=1).validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False)
    assert found[0] == found[1] != plain
    fresh = Seeded()
    fresh.attend(a_call())
    assert fresh.report()["features"] == round(8 * math.log(8))


@pytest.mark.parametrize("settings", [{"features": -1}, {"redraw": 0}, {"features": 2.5}])
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Performer.*expected an integer >= [01]"):
        Performer(**settings)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "Performer", {"features": 16}, model="TinyGPT", data="Sequences", max_steps=2)
