"""benchmarks.optimizer_memory: the page is made of the committed results, and peaks are what tensors are there."""

import argparse
import json

import pytest

from benchmarks import optimizer_memory

SHAPE = {"layers": 3, "heads": 2, "dim": 64, "vocabulary": 61, "positions": 16, "length": 4, "batch_size": 1}


def test_the_page_is_made_of_the_committed_results() -> None:
    result = json.loads(optimizer_memory.RESULTS.read_text())
    text = optimizer_memory.PAGE.read_text()
    assert text == optimizer_memory.page(text, result)
    assert set(result["arms"]) == set(optimizer_memory.ARMS)


@pytest.mark.filterwarnings("ignore")
def test_small_runs_hold_what_their_rules_say() -> None:
    args = argparse.Namespace(**SHAPE)
    names = ("AdamW", "OptimizerInBackward", "APOLLO-Mini", "LISA, 2 blocks, OptimizerInBackward")
    plain, within, mini, lisa = (optimizer_memory.measure(optimizer_memory.ARMS[name](args), args) for name in names)
    maps = [(64, 192), (64, 64), (64, 256), (256, 64)]
    block = sum(m * n + n for m, n in maps) + 4 * 64
    weights = 3 * block + 61 * 64 + 16 * 64 + 2 * 64
    scalars = 4 * 4 * (3 * 12 + 4)  # steps, and norms of updates
    assert 8 * weights <= plain["optimizer"] <= 8 * weights + scalars
    assert within["optimizer"] == plain["optimizer"]
    assert plain["peak"] - within["peak"] > 4 * 2 * block  # at least the gradients of all blocks but one are not held
    # of rank 1, along the longer side: the fused projection is three matrices, as the one after it; and two of the MLP
    projected = 3 * (4 * (2 * 64 + 1) + 2 * (2 * 256 + 1))
    rest = 2 * (weights - 3 * sum(m * n for m, n in maps)) + 3 * 8 + 4  # AdamW's moments and step numbers
    assert mini["optimizer"] == 4 * (projected + rest)
    assert lisa["peak"] < within["peak"]
