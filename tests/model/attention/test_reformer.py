"""Reformer: of one bucket it is softmax attention, and of several softmax over the pairs that meet, each once."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff import Reformer
from lightning_eff.model.attention._replacing.hashing import arranged, buckets_of, hashed_attention
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, a_call, gradients, loss_of, reference, replaced, weights_of
from tests.models import TinyGPT, loader, trainer
from tests.runs import fit_yaml

UNSEEN = "found no attention call in training_step"
CASES = {
    "Reformer": Case(
        active=lambda: Reformer(buckets=4, rounds=2),
        neutral=lambda: Reformer(buckets=0),
        lost=(classifier, "classifier", UNSEEN),
        refuses={"classifier": UNSEEN},
    )
}


class Seeded(Reformer):
    """Outside of a run."""

    seed = 0  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]


PADDING = (torch.arange(13) < torch.tensor([[13], [7]]))[:, None, None]
CALLS = {
    "plain": a_call(),
    "causal": a_call(causal=True),
    "padded": a_call(mask=PADDING),
    "causal and padded": a_call(mask=PADDING & torch.ones(13, 13).tril().bool()),
}


@pytest.mark.parametrize("kind", sorted(CALLS))
def test_one_bucket_is_exact_and_kept_weights_sum_to_one(kind: str) -> None:
    call = CALLS[kind]
    wanted = reference(call.query, call.key, call.value, call.mask, causal=call.causal, scale=call.scale)
    for rounds in (1, 3):
        got = Seeded(buckets=1, rounds=rounds).attend(call)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    some = weights_of(Seeded(buckets=4, rounds=2).attend, call)
    torch.testing.assert_close(some.sum(-1), torch.ones_like(some.sum(-1)))
    seen = call.may_see()
    met = (some > 0) & ~torch.eye(13, dtype=torch.bool)
    assert seen is None or not bool((met & ~seen).any())
    assert 0.15 < float((some > 0).double().mean()) < 0.8


def met(of_queries: Tensor, of_keys: Tensor, m: int, *, causal: bool, there: Tensor) -> Tensor:
    """Which keys each query sees in one round, counted query by query: (L, L), bool."""
    length = len(of_queries)
    pairs = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        mine = [j for j in range(length) if there[j] and of_keys[j] == of_queries[i]]
        rank = max(sum(j <= i for j in mine) - 1, 0)
        start = max(0, rank // m * m - (m if causal else m // 2))
        for r, j in enumerate(mine):
            pairs[i, j] = start <= r < start + 2 * m and (j <= i or not causal)
    return pairs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_pairs_share_a_bucket_and_a_window_in_any_round_and_count_once(causal: bool, padded: bool, rounds: int) -> None:
    """Against a mask of pairs, found query by query; and gradients."""
    torch.manual_seed(0)
    length, chunk = 21, 3
    q, k, v = (torch.randn(3, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    there = torch.arange(length) < torch.tensor([[21], [15], [4]]) if padded else torch.ones(3, length).bool()
    r = torch.randn(rounds, 4, 3)
    bq, bk = buckets_of(q, r), buckets_of(k, r)
    assert int(bq.max()) <= 5 and len(bq.unique()) > 3
    pairs = torch.stack(
        [
            torch.stack([met(bq[n, t], bk[n, t], chunk, causal=causal, there=there[n]) for t in range(rounds)]).any(0)
            for n in range(3)
        ]
    )
    got = hashed_attention(
        q, k, v, bq, bk, scale=0.5, causal=causal, there=there if padded else None, chunk=chunk, buckets=6
    )
    scores = (q @ k.mT * 0.5).masked_fill(~pairs, -torch.inf)
    none = ~pairs.any(-1, keepdim=True)
    wanted = torch.where(none, v, scores.masked_fill(none, 0.0).softmax(-1) @ v)
    torch.testing.assert_close(got, wanted)
    weights = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad((t * weights).sum(), (q, k, v)) for t in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("buckets", [1, 2, 6, 8])
def test_chunks_suffice_for_any_hash(length: int, buckets: int) -> None:
    """Each query has a place of its own, also where all queries share a bucket, or all keys do."""
    g = torch.Generator().manual_seed(0)
    chunk = -(-length // buckets)
    drawn = [torch.randint(0, buckets, (2, length), generator=g) for _ in range(4)]
    one, each = torch.zeros(2, length, dtype=torch.long), torch.arange(length).expand(2, -1) % buckets
    for bq in (*drawn, one, each):
        for bk in (*drawn, one, each):
            found = arranged(bq, bk, chunk, buckets, causal=True)
            assert int(found.slots.max()) < found.queries[0].numel()
            back = found.queries.flatten(1).gather(1, found.slots)
            assert torch.equal(back, torch.arange(length).expand(2, -1)), "no two queries share a place"


def test_windows_hold_most_pairs_of_a_bucket() -> None:
    torch.manual_seed(0)
    bq, bk = (torch.randint(0, 8, (5, 64)) for _ in range(2))
    there = torch.ones(64).bool()
    shares = [float(met(bq[n], bk[n], 8, causal=False, there=there).sum()) for n in range(5)]
    total = sum(int((bq[n][:, None] == bk[n][None]).sum()) for n in range(5))
    assert sum(shares) / total > 0.9


def test_alike_directions_meet_more_often() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 8, generator=g)
    near, far = x + 0.2 * torch.randn(2000, 8, generator=g), torch.randn(2000, 8, generator=g)
    r = torch.randn(1, 8, 8, generator=g)
    same = [float((buckets_of(x, r) == buckets_of(y, r)).float().mean()) for y in (near, far)]
    assert same[0] > 0.7 and same[1] == pytest.approx(1 / 16, abs=0.03)
    assert torch.equal(buckets_of(x, r), buckets_of(3 * x, r)), "lengths are no matter"


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "module", "encoder", "causal", "heads in front"])
def test_every_kind_of_module_is_itself_with_one_bucket(name: str) -> None:
    net, loss = loss_of(name)
    plain = loss()
    wanted = gradients(net, plain)
    with replaced(Seeded(buckets=1).attend) as mode:
        found = loss()
        got = gradients(net, found)
    assert mode.calls >= 2
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    with replaced(Seeded(buckets=8, rounds=2).attend):
        assert not torch.equal(loss(), plain)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="it drops 10% of its weights, and Reformer has none"):
        trainer(Reformer(), max_steps=2).fit(Net("plain", 0.1), loader("tiny_gpt"))
    with replaced(Seeded().attend), pytest.raises(ValueError, match="adds numbers to the scores of keys"):
        a_call(mask=torch.randn(2, 1, 1, 13, dtype=torch.float64)).run()
    for settings in ({"buckets": 3}, {"buckets": -2}, {"rounds": 0}):
        with pytest.raises(ValueError, match=r"Reformer\(.*expected"):
            Reformer(**settings)


def test_it_draws_anew_in_each_step_and_evaluates_by_one_draw() -> None:
    pl.seed_everything(0, verbose=False)
    seen: list[Tensor] = []

    class Watch(Reformer):
        def _rotations(self, width: int, like: Tensor) -> Tensor:
            found = super()._rotations(width, like)
            seen.append(found)
            return found

    technique, net = Watch(buckets=4, rounds=2), TinyGPT(num_layers=1)
    t = trainer(technique, max_steps=3, limit_val_batches=1)
    plain = trainer(limit_val_batches=1)
    t.fit(net, loader("tiny_gpt"))
    assert len({r.data_ptr() for r in seen}) == len({float(r.sum()) for r in seen}) == 3
    assert technique.report() == {"attentions": 1, "pairs": 2 * 10 * 8 * 16}  # rounds, chunks, queries, keys
    found = [t.validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False) for _ in range(2)]
    assert found[0] == found[1] != plain.validate(net, loader("tiny_gpt", 4, shuffle=False), verbose=False)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "Reformer", {"buckets": 4}, model="TinyGPT", data="Sequences", max_steps=2)
