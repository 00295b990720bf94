"""What idle techniques add to a step, counted: a busy machine changes no count."""

import pytest

from benchmarks import overhead


@pytest.mark.filterwarnings("ignore")
def test_idle_techniques_add_little_to_a_step() -> None:
    """The GPT of 12 blocks, narrow: width and length change no count.

    Beside plain Lightning, most of what is added are Lightning's own calls of callbacks' hooks; these an empty callback
    costs too.
    """
    args = overhead.parser().parse_args(
        ["--steps", "4", "--warm-up", "3", "--dim", "8", "--length", "16", "--batch-size", "2"]
    )
    found = overhead.counts(args)
    operations, calls = found["torch_operations_per_step"], found["python_calls_per_step"]
    assert operations["plain"] > 2000
    assert operations["empty_callbacks"] == operations["plain"]
    assert operations["idle"] - operations["plain"] == pytest.approx(2, abs=0.5)  # two detach, of no data
    assert calls["plain"] > 5000
    assert calls["idle"] - calls["empty_callbacks"] < 330
    assert calls["empty_callbacks"] - calls["plain"] > 800, "or this is no longer Lightning's own share"
