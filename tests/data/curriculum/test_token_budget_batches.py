"""TokenBudgetBatches: each sample once, no batch above its budget, ranks even, and exact resume in mid-epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_eff._core.rng import keyed_generator
from lightning_eff.data.curriculum.token_budget_batches import TokenBudgetBatches, budgeted, cost, cut, evened
from tests.cases import Case, classifier
from tests.models import Samples, module, trainer
from tests.runs import fit_yaml

_NO_TOKENS = "found no sequence of integers in a sample"
CASES = {
    "TokenBudgetBatches": Case(
        active=lambda: TokenBudgetBatches(96, window=16),
        neutral=lambda: TokenBudgetBatches(0),
        model="padded",
        refuses={"vit": _NO_TOKENS},
        lost=(classifier, "classifier", _NO_TOKENS),
    )
}
LENGTHS = torch.randint(1, 40, (101,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_comes_once_and_no_batch_is_above_its_budget(ranks: int, padded: bool) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()  # the sampler leaves one out

    def batches(key: int) -> list[list[int]]:
        generator = keyed_generator(key)
        return budgeted(order, LENGTHS, 80, window=50, ranks=ranks, generator=generator, padded=padded)

    found = batches(0)
    assert sorted(i for batch in found for i in batch) == sorted(order)
    costs = [cost(batch, LENGTHS, padded=padded) for batch in found]
    assert max(costs) <= 80 and len(found) % ranks == 0
    assert found == batches(0) and found != batches(1)
    apart = [max(costs[i : i + ranks]) - min(costs[i : i + ranks]) for i in range(0, len(costs), ranks)]
    assert sum(apart) <= max(costs) - min(costs), "the ranks' batches of a step are neighbours among all"
    totals = [sum(costs[rank::ranks]) for rank in range(ranks)]
    assert max(totals) - min(totals) <= max(costs)
    if padded:  # sorting saves padding: as the user's order is cut, there is more of it
        tokens = sum(LENGTHS[i] for i in order)
        plain = sum(cost(batch, LENGTHS, padded=True) for batch in cut(order, LENGTHS, 80, padded=True))
        assert sum(costs) - tokens < 0.5 * (plain - tokens)


def test_batches_are_as_large_as_their_budget_allows() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    assert cut(range(8), lengths, 9, padded=True) == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert cut(range(8), lengths, 9, padded=False) == [[0, 1, 2, 3], [4], [5], [6, 7]]
    assert evened([[0, 1, 2], [3]], 3) == [[0], [1, 2], [3]]
    assert evened([[0], [1]], 3) == [[0], [1], [0]]
    assert evened([[0, 1], [2]], 5) == [[0], [1], [2], [0], [1]]
    assert evened([[0]], 4) == [[0]] * 4


def test_the_loader_makes_these_batches() -> None:
    """Of the lengths that the data set's masks tell."""
    net: Any = module("padded")
    data = Samples("padded", 20)
    lengths = data.batch["attention_mask"].sum(1).tolist()
    technique, seen, plain = TokenBudgetBatches(40, window=20), [], net.training_step

    def step(batch: Any, batch_idx: int) -> Any:
        seen.append(batch["attention_mask"].sum(1).tolist())
        return plain(batch, batch_idx)

    net.training_step = step
    trainer(technique, max_epochs=2, max_steps=-1).fit(net, DataLoader(data, 4, shuffle=True))
    half = len(seen) // 2
    for epoch in (seen[:half], seen[half:]):
        assert sorted(n for batch in epoch for n in batch) == sorted(lengths)
    assert seen[:half] != seen[half:]
    assert all(len(batch) * max(batch) <= 40 for batch in seen)
    assert technique.report()["tokens"] == len(seen[-1]) * max(seen[-1])
    assert technique.report()["samples"] == len(seen[-1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_tokens": -1}, r"max_tokens=-1\): expected an integer >= 0"),
        ({"max_tokens": 9, "window": 0}, r"window=0\): expected an integer >= 1: the number of consecutive samples"),
        ({"max_tokens": 9, "lengths": [0.5]}, r"lengths=\[0.5\]\): expected one integer >= 0 .*type torch.float32"),
    ],
)
def test_arguments_out_of_their_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"TokenBudgetBatches.*{message}"):
        TokenBudgetBatches(**kwargs)


@pytest.mark.parametrize(
    ("technique", "batch_size", "message"),
    [
        (
            lambda: TokenBudgetBatches(9, lengths=[8] * 11 + [10] * 9),
            4,
            "9 of 20 samples have more tokens.*max_tokens=10",
        ),
        (lambda: TokenBudgetBatches(9, lengths=[8] * 11), 4, "got 11 lengths for a data set of 20 samples"),
        (lambda: TokenBudgetBatches(9, lengths=[8] * 20), None, "a DataLoader with batch_size=None"),
    ],
)
def test_what_cannot_be_is_refused(technique: Any, batch_size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(technique(), max_steps=2).fit(module("padded"), DataLoader(Samples("padded", 20), batch_size))


def test_yaml_runs(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "TokenBudgetBatches", {"max_tokens": 64}, model="TinyGPT", data="Padded", max_steps=2)
