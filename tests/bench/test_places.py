"""The page names runs from another processor than the rest of their bench."""

import json
from pathlib import Path

import pytest

from benchmarks import evidence_places
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.references import References
from lightning_eff.monitor.machine import fingerprint
from tests.bench import synthetic


def test_runs_from_elsewhere_are_counted_by_file_and_processor(tmp_path: Path) -> None:
    for name in ("bench_one", "bench_two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(synthetic.everything()))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "measured.json").write_text(json.dumps({"runs": [{"cpu": "one"}], "machine": {"cpu": "one"}}))
    assert evidence_places.lines(tmp_path) == []

    whole = synthetic.everything()
    moved = [run for run in whole["runs"] if run["arm"] in ("baseline", "sharpness") and run["seed"] in (2, 3)]
    for run in moved:
        run["cpu"] = "one" if run["seed"] == 2 else "two"
    (tmp_path / "bench_two.json").write_text(json.dumps(whole))
    *_, one, two = evidence_places.lines(tmp_path)
    first, runs = whole["machine"]["cpu"], len(whole["runs"])
    assert one == f"| `bench_two` | {first} | one | 2 | 2 | 2 of {runs} |"
    assert two == f"| `bench_two` | {first} | two | 3 | 2 | 2 of {runs} |"


def test_the_step_costs_of_another_processor_count_here(tmp_path: Path) -> None:
    """A bench with this file finds the baseline's step costs of the other processor, and prices other arms beside them."""
    whole = synthetic.everything()
    assert whole["machine"]["cpu"] != fingerprint(1)["cpu"]
    theirs = whole["calibration"]["baseline"]["prices"]
    (kept := tmp_path / "kept.json").write_text(json.dumps(whole))
    (config := tmp_path / "baseline.yaml").write_text("model: 1\n")
    made = evidence_places.unit(kept, config, tmp_path / "out" / "unit.json")

    arm, here = Arm("baseline", "baseline", (str(config),)), fingerprint(whole["plan"]["threads"])
    measured = [{**price, "seconds": 3 * price["seconds"]} for price in theirs]
    slower = [{**price, "seconds": 2 * price["seconds"]} for price in measured]
    priced = References(made).apply(arm, here, {"baseline": measured, "slower": slower})
    assert priced["baseline"] == theirs
    assert [one["seconds"] for one in priced["slower"]] == pytest.approx([2 * one["seconds"] for one in theirs])
