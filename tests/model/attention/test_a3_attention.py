"""A3Attention: the greedy search against one written with heaps, and the cut of what it finds."""

import heapq
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff import A3Attention
from lightning_eff.model.attention.a3_attention import greedy_scores
from tests.cases import Case, classifier
from tests.model.attention.nets import a_call
from tests.runs import fit_yaml

UNSEEN = "found no attention call in training_step"
CASES = {
    "A3Attention": Case(
        active=lambda: A3Attention(search=0.25, cut=0.1),
        neutral=lambda: A3Attention(search=None, cut=0.0),
        lost=(classifier, "classifier", UNSEEN),
        refuses={"classifier": UNSEEN},
    )
}


def by_heaps(q: Tensor, k: Tensor, rounds: int) -> list[float]:
    """The search as the paper's queues do it, for one query (E,) and keys (S, E)."""
    products = [(float(q[e] * k[j, e]), j) for j in range(len(k)) for e in range(len(q))]
    largest, smallest = [(-p, j) for p, j in products], list(products)
    heapq.heapify(largest)
    heapq.heapify(smallest)
    score, total = [0.0] * len(k), 0.0
    for _ in range(rounds):
        p, j = heapq.heappop(largest)
        if -p > 0:
            score[j] -= p
            total -= p
        if total >= 0:
            p, j = heapq.heappop(smallest)
            if p < 0:
                score[j] += p
                total += p
    return score


@pytest.mark.parametrize("shift", [0.0, -1.0, 1.0])
def test_the_search_is_that_of_two_queues(shift: float) -> None:
    """Also where most products are negative, and the smallest are passed over."""
    torch.manual_seed(0)
    q, k = torch.rand(5, 6, dtype=torch.float64) + 0.1, torch.randn(11, 6, dtype=torch.float64) + shift
    for rounds in (1, 4, 11, 66):
        found = greedy_scores(q, k, None, rounds)
        wanted = torch.tensor([by_heaps(row, k, rounds) for row in q], dtype=torch.float64)
        torch.testing.assert_close(found, wanted)
    assert shift > -1 or bool((greedy_scores(q, k, None, 11) > 0).any(-1).all()), "there is a candidate all the same"


def test_keys_that_may_not_be_seen_are_in_no_search() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    seen = torch.arange(9) < 5
    found = greedy_scores(q, k, seen.expand(3, 9), 6)
    torch.testing.assert_close(found[:, :5], greedy_scores(q, k[:5], None, 6))
    assert float(found[:, 5:].abs().max()) == 0.0


def test_of_the_candidates_those_near_the_largest_weight_stay() -> None:
    call = a_call(causal=True)
    weights = call.scores().softmax(-1)
    keep = A3Attention(search=None, cut=0.3).keep(call)
    assert torch.equal(keep, (weights >= 0.3 * weights.amax(-1, keepdim=True) - 1e-15) & (weights > 0))
    searched = A3Attention(search=0.3, cut=0.0).keep(call)
    both = A3Attention(search=0.3, cut=0.3).keep(call)
    assert not bool((both & ~searched).any()) and bool(both.any(-1).all()) and int(both.sum()) < int(searched.sum())
    among = weights.where(searched, 0.0)
    assert torch.equal(both, (among >= 0.3 * among.amax(-1, keepdim=True) - 1e-15) & searched)


def test_few_queries_at_a_time_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_eff.model.attention.a3_attention as module

    call = a_call(causal=True)
    whole = A3Attention().keep(call)
    monkeypatch.setattr(module, "_MOST", 2 * call.whole_key.numel())
    assert torch.equal(A3Attention().keep(call), whole)


@pytest.mark.parametrize("settings", [{"search": 0.0}, {"search": math.inf}, {"cut": 1.0}, {"cut": -0.1}])
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"A3Attention\(.*expected a .*number"):
        A3Attention(**settings)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "A3Attention", {"search": 0.25}, model="TinyGPT", data="Sequences", max_steps=2)
