"""Greedy layer-wise training; what it shares with freezing from below is tested beside that."""

from pathlib import Path

import pytest

from lightning_eff import GreedyLayerwise
from lightning_eff.model.growth.greedy_layerwise import block_at
from tests.cases import Case, no_blocks
from tests.runs import fit_yaml

CASES = {
    "GreedyLayerwise": Case(
        active=lambda: GreedyLayerwise(until=0.7),
        neutral=lambda: GreedyLayerwise(until=0.0),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    ),
}


def test_blocks_train_one_after_the_other_and_then_together() -> None:
    found = [block_at(u / 10, num_blocks=4, until=0.8) for u in range(11)]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, None, None, None]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"until=1.5\): expected a number in \[0, 1\]: the fraction of the budget"):
        GreedyLayerwise(until=1.5)


def test_runs_by_a_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "GreedyLayerwise", {"until": 0.5}, max_steps=4)
