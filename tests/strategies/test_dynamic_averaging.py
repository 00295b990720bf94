"""Dynamic averaging under two processes: when ranks average against one process, what is sent, and exact resumes."""

import math
from typing import Any

import pytest

from lightning_eff.strategies.dynamic_averaging import DynamicAveraging
from tests.cases import Case
from tests.conftest import Once
from tests.runs import differences, final_state, fit
from tests.strategies.communication_launch import launch

CASES = {
    "DynamicAveraging": Case(
        active=lambda: DynamicAveraging(1e-3, interval=2, warmup_steps=2),
        neutral=lambda: DynamicAveraging(1e-3, warmup_steps=math.inf),
        exact=True,
        figure="local_steps",
        anywhere=True,
    )
}

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    jobs = ("dynamic_reference", "dynamic_extremes", "dynamic_resume")
    return once("dynamic_averaging", lambda: launch(*jobs, of="reference_jobs"))


def test_two_ranks_train_as_the_algorithm_does_in_one_process(two: dict[str, Any]) -> None:
    found = two["dynamic_reference"]
    assert found["error"] < 1e-12
    checks = found["reported"][3::2]  # two plain steps, then a check every second step
    assert [check["distance"] for check in checks] == pytest.approx(found["expected"], rel=1e-5)
    over = [distance > found["threshold"] for distance in found["expected"]]
    assert [check["averagings"] for check in checks] == [sum(over[: i + 1]) for i in range(len(over))]
    assert 0 < sum(over) < len(over), "always the same decision"


def test_a_check_sends_a_number_and_an_averaging_the_weights(two: dict[str, Any]) -> None:
    found = two["dynamic_reference"]
    weights = 8.0 * found["numel"]  # in float64, between two ranks
    over = [distance > found["threshold"] for distance in found["expected"]]
    checks = [sent for average in over for sent in (0.0, 4.0 + average * weights)]
    assert found["bytes"] == [weights, weights, *checks]
    assert found["alike"] == [True, True, *(same for average in over for same in (False, average))]


def test_ranks_stay_within_the_threshold_after_every_check(two: dict[str, Any]) -> None:
    found = two["dynamic_reference"]
    after = found["divergence"][3::2]
    assert all(divergence <= found["threshold"] for divergence in after)
    assert max(after) > 0


def test_a_threshold_of_zero_is_local_sgd(two: dict[str, Any]) -> None:
    assert two["dynamic_extremes"]["equal"]


def test_an_infinite_threshold_never_averages(two: dict[str, Any]) -> None:
    assert two["dynamic_extremes"]["never"] == 0


def test_a_weight_that_is_not_a_number_is_beyond_any_threshold(two: dict[str, Any]) -> None:
    assert two["dynamic_extremes"]["broken"] == 1


def test_overwritten_weights_are_averaged_at_the_next_check(two: dict[str, Any]) -> None:
    assert two["dynamic_extremes"]["told"] == 1


def test_resume_equals_uninterrupted(two: dict[str, Any]) -> None:
    found, whole = two["dynamic_resume"], two["dynamic_resume"]["parameters"]
    assert found["differences"] == [{}, {}]
    assert found["alike"], "ranks end with different weights"
    assert found["alone"], "one process did not go on"
    assert sorted(kept["reference"] for kept in found["kept"]) == [0, whole], "one checkpoint where ranks have met"


def test_checkpoints_hold_the_mean(two: dict[str, Any]) -> None:
    assert two["dynamic_resume"]["error"] < 1e-6


def test_one_process_is_plain_training() -> None:
    plain = final_state(*fit("tiny_gpt", list))
    assert differences(plain, final_state(*fit("tiny_gpt", lambda: [DynamicAveraging(0.0, interval=2)]))) == []
    assert DynamicAveraging(0.1, warmup_steps=math.inf).neutral


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": -1.0}, r"DynamicAveraging\(threshold=-1.0\): expected a finite number >= 0 or inf: Delta"),
        ({"threshold": math.nan}, r"DynamicAveraging\(threshold=nan\)"),
        ({"threshold": 1.0, "interval": 0}, r"DynamicAveraging\(interval=0\): expected an integer >= 1: b, the number"),
        ({"threshold": 1.0, "warmup_steps": -1}, r"DynamicAveraging\(warmup_steps=-1\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicAveraging(**arguments)
