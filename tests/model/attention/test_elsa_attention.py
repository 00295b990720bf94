"""ELSAAttention: hashes that tell angles, a threshold that is learnt, and attention that is exact on what is left."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff import ELSAAttention
from lightning_eff.model.attention._replacing.projections import orthogonal_rows
from lightning_eff.model.attention.elsa_attention import estimated_angles, sign_hash, threshold_of
from tests.cases import Case, classifier
from tests.model.attention.nets import a_call, reference, weights_of
from tests.models import TinyGPT, loader, trainer
from tests.runs import fit_yaml

UNSEEN = "found no attention call in training_step"
CASES = {
    "ELSAAttention": Case(
        active=lambda: ELSAAttention(p=2.0, bits=16),
        neutral=lambda: ELSAAttention(p=0.0),
        lost=(classifier, "classifier", UNSEEN),
        refuses={"classifier": UNSEEN},
    )
}


def test_a_hash_is_at_no_distance_from_itself_and_tells_angles() -> None:
    g = torch.Generator().manual_seed(0)
    r = orthogonal_rows(512, 16, g).double()
    torch.testing.assert_close(r[:16] @ r[:16].T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-6)
    q = torch.randn(40, 16, dtype=torch.float64, generator=g)
    k = torch.randn(30, 16, dtype=torch.float64, generator=g)
    own = estimated_angles(sign_hash(q, r), sign_hash(q, r), 0.0)
    assert float(own.diagonal().abs().max()) == 0.0
    assert torch.equal(sign_hash(q, r), sign_hash(7.5 * q, r)), "lengths are no matter"
    torch.testing.assert_close(
        estimated_angles(sign_hash(q, r), sign_hash(-q, r), 0.0).diagonal(),
        torch.full((40,), math.pi, dtype=torch.float64),
    )
    angles = torch.nn.functional.cosine_similarity(q[:, None], k[None], dim=-1).acos()
    found = estimated_angles(sign_hash(q, r), sign_hash(k, r), 0.0).double()
    assert float((found - angles).abs().max()) < 0.3 and abs(float((found - angles).mean())) < 0.01
    less = estimated_angles(sign_hash(q, r), sign_hash(k, r), 0.127).double()
    torch.testing.assert_close(less, (found - 0.127).clamp_min(0), rtol=1e-5, atol=1e-6)


def test_the_threshold_is_learnt_of_the_least_similar_keys_that_matter() -> None:
    call = a_call(causal=True, groups=1, size=2.0)
    found: list[float] = []
    for b in range(2):
        for h in range(4):
            q, k = call.query[b, h], call.key[b, h]
            for i in range(13):
                largest = max(float(x.norm()) for x in k[: i + 1])
                weights = torch.tensor([float(q[i] @ k[j]) * call.scale for j in range(i + 1)]).softmax(0)
                matter = [j for j in range(i + 1) if float(weights[j]) > 1.5 / (i + 1)]
                if matter:
                    found.append(min(float(q[i] @ k[j]) / (float(q[i].norm()) * largest) for j in matter))
    got = threshold_of(call.query, call.key, call.scores(), 1.5)
    assert float(got) == pytest.approx(sum(found) / len(found), rel=1e-6)


def with_threshold(value: float, **settings: Any) -> ELSAAttention:
    """One that has learnt this threshold, in a run that is over."""

    class Learnt(ELSAAttention):
        seed = 3  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    made = Learnt(**settings)
    made._threshold = value
    return made


def test_without_a_threshold_it_is_exact_and_else_kept_weights_sum_to_one() -> None:
    padding = (torch.arange(13) < torch.tensor([[13], [7]]))[:, None, None]
    for call in (a_call(causal=True), a_call(mask=padding)):
        wanted = reference(call.query, call.key, call.value, call.mask, causal=call.causal, scale=call.scale)
        torch.testing.assert_close(with_threshold(-math.inf).attend(call), wanted, rtol=1e-6, atol=1e-7)
        some = weights_of(with_threshold(0.3).attend, call)
        torch.testing.assert_close(some.sum(-1), torch.ones_like(some.sum(-1)))
        seen = call.may_see()
        assert seen is not None and not bool(((some > 0) & ~seen).any())
        assert 0.1 < float((some > 0).double().sum() / seen.expand(some.shape).sum()) < 0.9


def test_the_first_batch_teaches_the_run_and_evaluations_after_it() -> None:
    pl.seed_everything(0, verbose=False)
    net, technique = TinyGPT(num_layers=2), ELSAAttention(p=2.0, bits=16)
    t = trainer(technique, max_steps=2, limit_val_batches=1, num_sanity_val_steps=1)
    t.fit(net, loader("tiny_gpt"), loader("tiny_gpt", 4))
    report = dict(technique.report())
    assert -1 < report["threshold"] < 1 and 0.05 < float(report["kept"]) < 1 and report["attentions"] == 2
    (found,) = t.validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False)
    (plain,) = trainer(limit_val_batches=2).validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False)
    with pytest.warns(
        UserWarning, match="no threshold is learnt yet, so this evaluation computes plain attention"
    ) as seen:
        (fresh,) = trainer(ELSAAttention(), limit_val_batches=2).validate(
            net, loader("tiny_gpt", 4, shuffle=False), verbose=False
        )
    assert sum("no threshold is learnt" in str(w.message) for w in seen) == 1
    assert found != plain == fresh, "one that has learnt nothing leaves attention as it is"


@pytest.mark.parametrize("settings", [{"p": -1.0}, {"p": math.inf}, {"bits": 0}, {"correction": 4.0}])
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"ELSAAttention.*expected"):
        ELSAAttention(**settings)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "ELSAAttention", {"p": 2.0, "bits": 16}, model="TinyGPT", data="Sequences", max_steps=2)
