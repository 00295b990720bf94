"""What adapters save of memory and cost of the loss: the pages are made of the results, and small runs say what they must."""

import argparse
import json
from typing import Any

from benchmarks import adapter_memory, fine_tuning


def result_of(benchmark: Any) -> dict[str, Any]:
    return json.loads(benchmark.RESULTS.read_text())


def test_the_page_is_made_of_the_committed_results() -> None:
    text = adapter_memory.PAGE.read_text()
    assert text == adapter_memory.page(text, result_of(adapter_memory))
    assert text == fine_tuning.page(text, tuned := result_of(fine_tuning))
    assert fine_tuning.FIGURE.read_text() == fine_tuning.svg(tuned)
    assert set(result_of(adapter_memory)["arms"]) == set(adapter_memory.ARMS)
    assert set(tuned["arms"]) == set(fine_tuning.ARMS)


def test_committed_figures_are_those_of_gpt2() -> None:
    full, lora, qlora = result_of(adapter_memory)["arms"].values()
    assert full["trained"] == 124_439_808
    assert (
        full["gradients"] == 4 * full["trained"] and 8 * full["trained"] <= full["optimizer"] < 8.001 * full["trained"]
    )
    # factors of rank 8 beside four maps of each of 12 blocks
    assert lora["trained"] == qlora["trained"] == 12 * 8 * ((768 + 2304) + (768 + 768) + (768 + 3072) + (3072 + 768))
    assert lora["gradients"] == 4 * lora["trained"]
    maps = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)  # in 4 bits and some for scales
    assert 4 * maps * 0.85 < lora["weights"] - qlora["weights"] < 4 * maps * 0.875


def test_small_runs_count_what_trains_and_hold_less() -> None:
    shape = {"layers": 2, "heads": 2, "dim": 64, "vocabulary": 61, "positions": 16, "length": 16}
    args = argparse.Namespace(steps=1, rank=4, batch_size=2, **shape)
    full, lora, qlora = (adapter_memory.measure(build(args), args) for build in adapter_memory.ARMS.values())
    assert full["gradients"] == 4 * full["trained"]
    assert lora["gradients"] == qlora["gradients"] == 4 * lora["trained"] < full["gradients"] / 5
    assert lora["trained"] == qlora["trained"] == 2 * 4 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))
    assert lora["weights"] == full["weights"] + lora["gradients"]
    assert qlora["weights"] < full["weights"] / 2
