"""Rehearsals in turns, on arms with given step times: their order, and the runs that follow from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.references import References
from lightning_eff.bench.rehearsing import Rehearsing
from tests.bench.test_references import MACHINE, baseline, price


class Machine:
    """Arms that take set seconds a step, times ``busy``; one that is named in ``fails`` crashes from that round on."""

    def __init__(self, busy: float = 1.0, fails: Mapping[str, str] | None = None, last: float = 0.0) -> None:
        self.busy, self.fails, self.last = busy, fails or {}, last
        self.asked: list[tuple[str, list[str], int, dict[str, int], bool]] = []

    def __call__(
        self, arms: list[Arm], what: str, sweep: int, steps: Mapping[str, int], inspect: bool
    ) -> list[dict[str, Any]]:
        told = {arm.name: steps[arm.name] for arm in arms}
        self.asked.append((what, [arm.name for arm in arms], sweep, told, inspect))
        return [self.record(arm.name, sweep, what) for arm in arms]

    def record(self, name: str, sweep: int, what: str) -> dict[str, Any]:
        if self.fails.get(name) == what:
            return {"status": "crashed", "error": f"in {what}"}
        seconds = {"baseline": 0.1, "recipe": 0.2, "other": 0.1}[name] * self.busy
        return {
            "status": "finished",
            "kinds": ["a"] * sweep,
            "times": [seconds] * sweep,
            "samples": 8 * sweep,
            "steps": sweep,
            "tokens": 0,
            "losses": [1.0] * sweep,
            "metrics": [],
            "techniques": [name],
            "data": {"training": None, "validation": ["x"]},
            "facts": {},
            "lr": {"peak": 1.0, "peak_at": 0.1, "last": self.last},
        }


def made(machine: Machine, reference: References | None = None, budget: float = 6.0, rounds: int = 4) -> dict[str, Any]:
    others = [Arm(name, "recipe", baseline().source) for name in ("recipe", "other")]
    return Rehearsing(machine, budget, rounds, reference, MACHINE, False).calibrated(baseline(), others)


def test_each_arm_passes_through_the_schedule_of_its_own_run() -> None:
    machine = Machine()
    found = made(machine)
    assert {name: found[name]["steps"] for name in found} == {"baseline": 60, "recipe": 30, "other": 60}
    assert machine.asked[0] == ("first", ["baseline"], 8, {"baseline": 8}, False)
    assert machine.asked[1] == ("probe", ["baseline", "recipe", "other"], 24, dict.fromkeys(found, 24), True)
    rounds = machine.asked[2:]
    assert [what for what, *_ in rounds] == ["round1", "round2", "round3", "round4"]
    assert all(steps == {"baseline": 60, "recipe": 30, "other": 60} for *_, steps, _ in rounds)
    assert [names[0] for _, names, *_ in rounds] == ["recipe", "other", "baseline", "recipe"], "each begins in turn"


@pytest.mark.parametrize("busy", [0.4, 3.0])
def test_by_the_reference_a_schedule_is_as_long_as_the_run_on_a_busy_machine_too(tmp_path: Path, busy: float) -> None:
    """Else a budget that holds a whole schedule seems too short for one, and the bench is refused."""
    reference = References(tmp_path / "prices.json")
    reference.apply(baseline(), MACHINE, {"baseline": [price("a", 0.1)]})
    machine = Machine(busy)
    found = made(machine, reference)
    assert all(steps == {"baseline": 60, "recipe": 30, "other": 60} for *_, steps, _ in machine.asked[2:])
    assert {name: found[name]["steps"] for name in found} == {"baseline": 60, "recipe": 30, "other": 60}
    assert found["recipe"]["prices"][0]["seconds"] == pytest.approx(0.2)


def test_an_arm_that_fails_is_left_out_from_there_on() -> None:
    machine = Machine(fails={"recipe": "probe", "other": "round2"})
    found = made(machine)
    assert found["recipe"]["failed"]["error"] == "in probe" and found["other"]["failed"]["error"] == "in round2"
    assert [names for _, names, *_ in machine.asked[2:]] == [
        ["other", "baseline"],
        ["baseline", "other"],
        ["baseline"],
        ["baseline"],
    ]
    assert found["baseline"]["steps"] == 60


@pytest.mark.parametrize("when", ["first", "probe", "round1", "round3"])
def test_nothing_is_compared_with_a_baseline_that_fails(when: str) -> None:
    with pytest.raises(RuntimeError, match=f"baseline crashed in its rehearsal.*in {when}"):
        made(Machine(fails={"baseline": when}))


def test_a_baseline_that_is_not_decayed_is_refused_after_one_round() -> None:
    machine = Machine(last=0.5)
    with pytest.raises(Incomparable, match="ends at 50% of its peak after the 60 steps"):
        made(machine)
    assert machine.asked[-1][0] == "round1"
