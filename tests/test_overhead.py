"""What idle techniques add to a step, counted: a busy machine changes no count."""

import pytest

from benchmarks import overhead


@pytest.mark.filterwarnings("ignore")
def test_idle_techniques_add_little_to_a_step() -> None:
    """The GPT of 12 blocks, narrow: width and length change no count.

    An empty callback costs Lightning's own calls of its hooks; hooks of techniques that have nothing to do are not called.
    """
    args = overhead.parser().parse_args(
        ["--steps", "4", "--warm-up", "3", "--dim", "8", "--length", "16", "--batch-size", "2"]
    )
    found = overhead.counts(args)
    operations, calls = found["torch_operations_per_step"], found["python_calls_per_step"]
    built_in = found["built_in_calls_per_step"]
    assert operations["plain"] > 2000
    assert operations["empty_callbacks"] == operations["plain"]
    assert operations["idle"] <= 1.01 * operations["plain"]
    assert calls["plain"] > 3000
    assert calls["idle"] <= 1.01 * calls["plain"]
    assert calls["empty_callbacks"] > 1.1 * calls["plain"], "or hooks that do nothing cost nothing by now"
    asking = 12 * len(overhead.idle(args.layers))  # Lightning's own: whether a callback has the hook, and can call it
    assert built_in["idle"] - built_in["plain"] <= asking + 5
