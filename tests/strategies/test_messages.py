"""What a step sends and waits for does not grow with micro-batches or parameters, and rank 0 holds pieces of others' state."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.messages import Reads, table
from lightning_eff.strategies._communication.onebit_lamb import OneBitLamb
from tests.strategies.launch import launch

ROOT = Path(__file__).parent.parent.parent


@cache
def observed() -> dict[str, Any]:
    return launch("tests.strategies.message_jobs", "observe", "", world_size=2, timeout=1200)


def test_more_microbatches_are_not_waited_for_more() -> None:
    few, many = observed()["steps"]["few"], observed()["steps"]["many"]
    assert few["waits_of_the_host"] == many["waits_of_the_host"], (few["by_place"], many["by_place"])
    assert few["collectives"] == many["collectives"]
    assert few["sends_and_receives"] < many["sends_and_receives"], "what hands on hidden states was not counted"
    assert 0 < many["waits_of_the_host"] <= 4, many["by_place"]


def test_sharded_steps_wait_for_nothing() -> None:
    shards = observed()["steps"]["shards"]
    assert shards["waits_of_the_host"] == 0, shards["by_place"]
    assert shards["collectives"] > 0


@pytest.mark.parametrize(("mean", "both", "alone"), [("False", 3.0, 4.0), ("True", 1.5, 2.0)])
def test_gradients_travel_together(mean: str, both: float, alone: float) -> None:
    found = observed()["sums"][mean]
    assert found["both"] == [both]
    assert found["alone"] == [alone] * 3
    assert set(found["none"]) == {None}, "one that no rank has stays None"
    assert found["messages"] == 2, "one for each type"
    assert found["reads"] == [2, 2], "a rank that lacks some reads which are somewhere, once for each type"
    assert observed()["sums"]["reads where all are there"] == [0, 0]
    assert observed()["sums"]["messages of 24 bytes"] == 5


def test_norms_take_as_many_calls_for_many_gradients_as_for_few() -> None:
    few, many = observed()["norms"]["operations"]
    assert few == many


def test_what_ranks_keep_comes_to_rank_0_in_pieces() -> None:
    assert observed()["gathering"]["right"]
    assert 0 < observed()["gathering"]["most"] <= 1024


def test_large_weights_are_whole_on_one_rank_and_the_next_run_goes_on_from_them() -> None:
    ends = observed()["ends"]
    whole = ends["small"][0]
    assert ends["small"] == ends["asked"] == [whole, whole]
    assert ends["large"] == [whole, None]
    assert ends["none"] == [None, None]
    assert ends["large, again"] == ends["small, again"]
    assert ends["large, again"][0] != whole
    assert "TinyClassifier has no weights" in ends["none, again"][0]


def test_unused_parameters_are_looked_for_where_asked() -> None:
    assert "find_unused_parameters" in observed()["unused"]


def test_lamb_reads_no_numbers() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))]
    lamb = OneBitLamb(torch.optim.AdamW(params, lr=0.1, weight_decay=0.1), freeze_step=3)
    lamb.begin(lambda wanted: None)
    for step in range(6):
        for p in params:
            p.grad = torch.randn_like(p)
        with Reads() as reads:
            lamb.step()
        if step != 2:  # where the second moments are frozen, once in a run
            assert not reads.places, (step, reads.places)


def test_the_page_shows_the_counts_that_were_taken() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "messages.json").read_text())
    assert table(result) in (ROOT / "docs" / "parallelism.md").read_text()
