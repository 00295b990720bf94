"""The evidence page: compilation inside and outside the budget, and ladders joined to earlier ones."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import evidence, evidence_setup, goal
from lightning_eff.bench.reports.statistics import summarize
from tests.bench import synthetic

COMPILED = ["trainer: {}", "trainer:\n  callbacks:\n    - class_path: RegionalCompilation"]


def compiled(seconds: float) -> dict:
    """A baseline, an arm that compiles for so many seconds, and another that does not."""
    arms = [
        synthetic.arm("baseline", "baseline"),
        synthetic.arm("compile", configs=COMPILED),
        synthetic.arm("plain"),
    ]
    made = synthetic.results({"baseline": 1.0, "compile": 1.5, "plain": 1.5}, arms=arms, noise=0.0)
    for run in made["runs"]:
        run["warmup_seconds"] = seconds if run["arm"] == "compile" else 0.0
    return {**made, "summary": summarize(made)}


def test_compiling_that_is_counted_comes_before_all_that_a_curve_reaches() -> None:
    made = compiled(6.0)
    apart, counted, longer = made["summary"], evidence_setup.included(made), evidence_setup.included(made, 30.0)
    for name, later in (("baseline", 0.0), ("compile", 6.0), ("plain", 0.0)):
        before, after = (summary[name]["time_to_target"]["seconds"] for summary in (apart, counted))
        assert after == pytest.approx([seconds + later for seconds in before])
    assert longer["plain"] == apart["plain"]
    before, after = (s["compile"]["time_to_target"]["seconds"] for s in (apart, longer))
    assert after == pytest.approx([seconds + 30.0 for seconds in before])
    speeds = [summary["compile"]["speedup"]["estimate"] for summary in (apart, counted, longer)]
    assert speeds[0] > 1 > speeds[2] and speeds[0] > speeds[1] > speeds[2]


def test_the_page_tells_compiling_apart_and_counted_of_the_arms_that_compile_alone() -> None:
    made = compiled(6.0)
    seconds = {"empty": {"processor_seconds": 31.0}, "filled": {"processor_seconds": 2.5}}
    measured = {
        "recipe": "recipes/compile.yaml",
        "median": seconds,
        "runs": {"empty": [{}] * 3},
        "machine": {"torch": "2.13.0"},
    }
    assert evidence_setup.arms_that_compile(made) == ["compile"]
    text = evidence_setup.lines(made, measured)
    rows = [line for line in text if line.startswith("| compile")]
    assert len(rows) == 3 and "| left out |" in rows[0] and "6.0 s" in rows[1] and "31.0 s" in rows[2]
    assert "2.5 s" in text[0] and not any(line.startswith("| plain") for line in text)
    assert "not measured" in evidence_setup.lines(made, None)[0]
    plain = synthetic.everything()
    assert evidence_setup.lines({**plain, "summary": summarize(plain)}, measured) == []


def test_a_ladder_joins_those_that_were_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(argv: list[str]) -> None:
        """In the place of runs: the baseline, and itself at the factors asked for."""
        told = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
        factors = [float(factor) for factor in told["ladder"].split(",")]
        arms = [synthetic.arm("baseline", "baseline")]
        arms += [synthetic.arm(f"baseline × {f:g}", "ladder", factor=f) for f in factors]
        made = synthetic.results({arm["name"]: 1.0 for arm in arms}, arms=arms)
        for run in made["runs"]:
            run["losses"] = []
        out = Path(told["out"])
        out.mkdir(parents=True)
        (out / "results.json").write_text(json.dumps(made))

    monkeypatch.setattr("lightning_eff.bench.command.main", bench)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(evidence, "OUT", tmp_path / "out")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "compute_rings.json").write_text(
        json.dumps({"calibration": {"baseline": {}}})
    )  # whose prices count
    for factors in ("0.5,1.5", "2.5,3"):
        monkeypatch.setattr(sys, "argv", ["evidence.py", "ladder", "rings", "--ladder", factors])
        evidence.main()
    kept = json.loads((tmp_path / "results" / "ladder_rings.json").read_text())
    assert [arm["factor"] for arm in kept["plan"]["arms"]] == [1.0, 0.5, 1.5, 2.5, 3.0]
    assert len(kept["runs"]) == 15 and len(kept["summary"]) == 5


def test_a_stack_in_the_place_of_the_baseline_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such results are no whole runs of a recipe against the baseline, and the page must not take them for some."""
    asked: list[dict[str, str]] = []

    def bench(argv: list[str]) -> None:
        told = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
        asked.append(told)
        made = synthetic.results({"muon_fused_mask_rate": 1.0, "other": 1.0})
        Path(told["out"]).mkdir(parents=True)
        (Path(told["out"]) / "results.json").write_text(json.dumps(made))

    monkeypatch.setattr("lightning_eff.bench.command.main", bench)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(evidence, "OUT", tmp_path / "out")
    words = [
        "run",
        "bert8k",
        "--set",
        "compute",
        "--only",
        "muon_fused_mask_rate_periods",
        "--of",
        "muon_fused_mask_rate",
    ]
    monkeypatch.setattr(sys, "argv", ["evidence.py", *words, "--budget", "30rs", "--seeds", "6,7"])
    evidence.main()
    (told,) = asked
    assert told["baseline"].startswith("muon_fused_mask_rate=") and told["baseline"].endswith(
        "/muon_fused_mask_rate.yaml"
    )
    assert told["recipe"].startswith("muon_fused_mask_rate_periods=") and told["controls"] == "none"
    assert told["reference"].startswith(str(tmp_path / "out")), "its seconds are not the baseline's"
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["beside_muon_fused_mask_rate_bert8k_30.json"]
    assert not goal.files("bert8k", tmp_path / "results", ("bench", "weights", "compute", "goal", "ladder"))
    monkeypatch.setattr(sys, "argv", ["evidence.py", *words, "--unit", "x.json"])
    with pytest.raises(SystemExit, match="--unit"):
        evidence.main()
