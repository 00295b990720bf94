"""SET: a constant share of the smallest weights moves to places that the seed alone tells."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff import SET
from tests.cases import Case, no_map
from tests.model.sparsity.sparse import fit_on
from tests.models import TinyGPT, make_batch
from tests.runs import fit_yaml

CASES = {
    "SET": Case(
        active=lambda: SET(sparsity=0.5, interval=3),
        neutral=lambda: SET(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


def test_a_constant_share_of_the_smallest_moves_to_random_places() -> None:
    torch.manual_seed(0)
    counts = fit_on(
        TinyGPT(2, dropout=0.0), make_batch("tiny_gpt"), SET(sparsity=0.6, interval=2, distribution="uniform"), steps=6
    )
    assert counts.leaks == []
    regrown = offered = 0
    for step in (1, 3, 5):
        for name, before in counts.masks[step - 1].items():
            after, w = counts.masks[step][name], counts.weights[step][name]
            count = int(before.sum())
            assert count == int(after.sum()) == round(0.4 * before.numel())
            gone, k = before & ~after, int(0.3 * count)
            assert int(gone.sum()) <= k, "of those that are dropped, some may grow again"
            assert bool((w[after & ~before] == 0).all())
            regrown, offered = regrown + k - int(gone.sum()), offered + k
    # k of the 0.6 n + k places that are free are drawn, of which k were just dropped
    expected = offered * 0.3 * 0.4 / (0.6 + 0.3 * 0.4)
    assert regrown == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 2.0}, r"SET\(sparsity=2.0\): expected"),
        ({"interval": 1.5}, "interval=1.5"),
        ({"fraction": 2}, "fraction=2"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SET(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SET", {"sparsity": 0.5, "interval": 2}, max_steps=3)
