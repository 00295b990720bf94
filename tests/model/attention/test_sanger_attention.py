"""SangerAttention: the pairs that a prediction in 4 bits leaves, exactly; with what holds of all that choose pairs."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff import A3Attention, ExactResume, MemoryEfficientAttention, SangerAttention
from lightning_eff.model.attention._replacing.selecting import SelectedKeys
from lightning_eff.model.attention.sanger_attention import quantized
from tests.cases import Case, classifier
from tests.model.attention.nets import HUGGING, OWN, a_call, gradients, loss_of, reference, replaced, weights_of
from tests.models import TinyGPT, flat, loader, trainer
from tests.runs import fit_yaml

UNSEEN = "found no attention call in training_step"
CASES = {
    "SangerAttention": Case(
        active=lambda: SangerAttention(threshold=0.15),
        neutral=lambda: SangerAttention(threshold=-math.inf),
        lost=(classifier, "classifier", UNSEEN),
        refuses={"classifier": UNSEEN},
    )
}


#: With thresholds at which all is kept, and at which little is.
EXACT: dict[str, SelectedKeys] = {
    "Sanger": SangerAttention(threshold=-1e30),
    "A3": A3Attention(search=None, cut=1e-300),
}
LITTLE: dict[str, SelectedKeys] = {
    "Sanger": SangerAttention(threshold=0.15),
    "A3": A3Attention(search=0.3, cut=0.4),
}
PADDING = (torch.arange(13) < torch.tensor([[13], [7]]))[:, None, None]
CALLS = {
    "plain": a_call(),
    "causal": a_call(causal=True),
    "padded": a_call(mask=PADDING),
    "causal and padded": a_call(mask=PADDING & torch.ones(13, 13).tril().bool()),
    "biased": a_call(mask=torch.randn(1, 4, 13, 13, dtype=torch.float64), groups=1),
    "left padded": a_call(mask=PADDING.flip(-1) & torch.ones(13, 13).tril().bool()),
}


@pytest.mark.parametrize("name", sorted(EXACT))
@pytest.mark.parametrize("kind", sorted(CALLS))
def test_a_threshold_that_keeps_all_is_exact_attention_and_kept_weights_sum_to_one(name: str, kind: str) -> None:
    call = CALLS[kind]
    wanted = reference(call.query, call.key, call.value, call.mask, causal=call.causal, scale=call.scale)
    torch.testing.assert_close(EXACT[name].attend(call), wanted, rtol=1e-6, atol=1e-7)
    whole = weights_of(EXACT[name].attend, call)
    some = weights_of(LITTLE[name].attend, call)
    there = whole.sum(-1) > 0
    torch.testing.assert_close(some.sum(-1)[there], torch.ones_like(some.sum(-1)[there]))
    kept = some > 0
    seen = call.may_see()
    assert seen is None or not bool((kept & ~seen).any()), "what the mask hides stays hidden"
    assert 0.05 < float(kept.double().sum() / (whole > 0).double().sum()) < 0.8
    expected = (whole * kept) / (whole * kept).sum(-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(some[there], expected[there])


def test_pairs_are_those_that_a_prediction_in_four_bits_leaves() -> None:
    call = a_call(causal=True, groups=1, size=2.0)
    keep = SangerAttention(threshold=0.1).keep(call)
    for b in range(2):
        for h in range(4):
            codes: list[Tensor] = []
            for x in (call.query[b, h], call.key[b, h]):
                steps = [float(row.abs().max()) / 7 for row in x]  # of each token
                rounded = [[round(float(value) / s) * s for value in row] for row, s in zip(x, steps, strict=True)]
                codes.append(torch.tensor(rounded))
            for i in range(13):
                scores = [float(codes[0][i] @ codes[1][j]) * call.scale for j in range(i + 1)]
                total = sum(map(math.exp, scores))
                left = {j for j in range(i + 1) if math.exp(scores[j]) / total > 0.1}
                left = left or {max(range(i + 1), key=lambda j: scores[j])}
                assert {*keep[b, h, i].nonzero().flatten().tolist()} == left


def test_levels() -> None:
    x = torch.linspace(-3, 3, 41, dtype=torch.float64).view(1, 1, 1, 41)
    assert len(quantized(x, 4).unique()) == 15 and len(quantized(x, 2).unique()) == 3
    assert float((quantized(x, 4) - x).abs().max()) <= 3 / 7 / 2 + 1e-12
    assert torch.equal(quantized(torch.zeros(1, 1, 3, 2), 4), torch.zeros(1, 1, 3, 2))
    tokens = torch.cat([x, 100 * x], dim=-2)
    assert torch.equal(quantized(tokens, 4)[..., :1, :], quantized(x, 4)), "each token has a step of its own"


@pytest.mark.parametrize("name", [*HUGGING, *OWN])
def test_every_kind_of_module_is_itself_where_all_is_kept(name: str) -> None:
    net, loss = loss_of(name)
    plain = loss()
    wanted = gradients(net, plain)
    with replaced(EXACT["Sanger"].attend) as mode:
        again = loss()
        got = gradients(net, again)
    assert mode.calls >= 2
    torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


def trained(*techniques: Any, **settings: Any) -> Tensor:
    torch.manual_seed(1)
    net = TinyGPT(num_layers=2)
    trainer(*techniques, max_steps=3, **settings).fit(net, loader("tiny_gpt", shuffle=False))
    return flat(net)


def test_several_that_choose_leave_what_all_of_them_keep_in_whatever_order_and_chunks_compute_it() -> None:
    sanger, a3 = SangerAttention(threshold=0.04), A3Attention(search=0.5, cut=0.1)
    both = trained(copy.deepcopy(sanger), copy.deepcopy(a3))
    assert torch.equal(trained(copy.deepcopy(a3), copy.deepcopy(sanger)), both)
    singles = [trained(sanger), trained(a3), trained(ExactResume())]
    assert not any(torch.equal(both, one) for one in singles)
    call = CALLS["causal"]
    kept = {name: weights_of(LITTLE[name].attend, call) > 0 for name in LITTLE}
    with replaced(LITTLE["A3"].attend), replaced(LITTLE["Sanger"].attend):
        together = weights_of(lambda c: c.run(), call) > 0
    assert not bool((together & ~kept["Sanger"]).any()) and bool((together.sum(-1) >= 1).all())
    chunks = MemoryEfficientAttention(chunk=8, kernel="chunks")
    exact = {"precision": "64-true"}
    alone = trained(SangerAttention(threshold=0.04), **exact)
    torch.testing.assert_close(trained(chunks, SangerAttention(threshold=0.04), **exact), alone, rtol=1e-6, atol=1e-8)
    assert chunks.report()["chunked"] == 2


def test_what_it_tells() -> None:
    technique = SangerAttention(threshold=0.04)
    trained(technique)
    report = technique.report()
    assert report["attentions"] == 2 and 0.1 < float(report["kept"]) < 0.95
    assert "of the pairs of 2 calls of attention per step" in technique.summary()


@pytest.mark.parametrize("settings", [{"threshold": 1.0}, {"threshold": math.nan}, {"bits": 1}, {"bits": 2.5}])
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SangerAttention.*expected"):
        SangerAttention(**settings)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SangerAttention", {"threshold": 0.01}, model="TinyGPT", data="Sequences", max_steps=2)
