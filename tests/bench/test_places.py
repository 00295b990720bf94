"""The page names runs from another processor than the rest of their bench."""

import json
from pathlib import Path

from benchmarks import evidence_places
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
