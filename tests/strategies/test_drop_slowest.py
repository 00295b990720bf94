"""Late ranks under two processes: whose gradients the mean is over, what waiting is saved, and DDP where nobody is late."""

import math
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.strategies.drop_slowest import DropSlowest, is_late, scale
from tests.cases import Case
from tests.conftest import Once
from tests.runs import differences, final_state, fit, fit_yaml
from tests.strategies.communication_launch import launch

CASES = {
    "DropSlowest": Case(
        active=lambda: DropSlowest(grace=1e9),  # nobody is late by chance
        neutral=lambda: DropSlowest(slowest=0),
        exact=True,
        figure="microbatches",
        anywhere=True,
    )
}

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    jobs = ("survivors", "nobody_late", "beside", "refused")
    return once("drop_slowest", lambda: launch(*jobs, of="drop_slowest_jobs"))


def test_the_rule() -> None:
    assert not is_late(1.1, 1.0, grace=0.1) and is_late(1.11, 1.0, grace=0.1)
    # two ranks of four, one of which did one: ((g1 + g2 + g3 + g4) + h1) / 8 becomes a mean of five
    assert scale(5, window=4, ranks=2) / (4 * 2) == pytest.approx(1 / 5)
    assert scale(8, window=4, ranks=2) == 1


def test_the_mean_is_over_the_micro_batches_that_were_done(two: dict[str, Any]) -> None:
    """Against SGD by hand on those alone; ranks end alike."""
    found = two["survivors"]
    assert found["alike"] and found["reports_alike"]
    assert found["error"] < 1e-6
    assert found["from_all"] > 1e-3, "what was left out would not have mattered"


def test_a_late_rank_leaves_out_what_it_has_not_begun(two: dict[str, Any]) -> None:
    found = two["survivors"]
    fast, slow = found["trained"]
    assert [fast[1], fast[3]] == [4, 4] and [slow[1], slow[3]] == [1, 1]
    done = sum(fast) + sum(slow)
    assert found["report"] == {"dropped": 40.0 - done, "microbatches": float(done), "share": (fast[4] + slow[4]) / 8}
    assert found["state"] == [[0, 0, found["state"][0][2]], [0, 0, found["state"][1][2]]]
    # 2 x 4 x 0.25 s of sleep under plain DDP, 2 x 0.25 s here
    assert max(found["took"]) < found["plain_took"] - 0.75


def test_nobody_late_is_ddp_bit_for_bit(two: dict[str, Any]) -> None:
    assert two["nobody_late"] == {key: [] for key in ("1 False", "1 True", "3 False", "3 True")}


def test_beside_techniques_that_look_and_exchange(two: dict[str, Any]) -> None:
    """Ranks end alike; where others exchange something in each micro-batch, nobody is late."""
    assert len(two["beside"]) == 4
    for name, found in two["beside"].items():
        assert found["alike"], name
        exchanges = "AutoAssist" in name or "SelectiveBackprop" in name
        assert found["dropped"] == 0 if exchanges else found["dropped"] >= 6, name


def test_what_ranks_would_wait_for_is_refused(two: dict[str, Any]) -> None:
    for told in two["refused"]["slowest"]:
        assert "DropSlowest(slowest=2): the run has 2 processes" in told
    for told in two["refused"]["log"]:
        assert "logs 'loss' with sync_dist=True at each step" in told


def test_one_process_is_plain_training() -> None:
    plain = final_state(*fit("tiny_gpt", list, accumulate_grad_batches=2))
    assert differences(plain, final_state(*fit("tiny_gpt", lambda: [DropSlowest()], accumulate_grad_batches=2))) == []
    assert DropSlowest(grace=math.inf).neutral


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slowest": -1}, r"slowest=-1\): expected an integer >= 0"),
        ({"slowest": 0.5}, r"slowest=0.5\)"),
        ({"grace": -0.1}, r"grace=-0.1\): expected a finite number >= 0 or inf: the extra time"),
        ({"grace": math.nan}, r"grace=nan\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"DropSlowest\(" + message):
        DropSlowest(**arguments)


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "DropSlowest", {"slowest": 1, "grace": 0.2}, max_steps=4, accumulate_grad_batches=2)
