"""Runs of another bench: reused if they would be the same, and refused otherwise."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.workers import InProcess
from tests.bench.tasks import arm
from tests.conftest import Once
from tests.tune.tasks import config


class Counting(InProcess):
    """Does jobs in this process, and counts them."""

    names: list[str] = []

    def together(self, jobs: Any, progress: Any) -> Iterator[tuple[Job, dict[str, Any]]]:
        Counting.names += [job.name for job in jobs]
        return super().together(jobs, progress)

    def each(self, jobs: Any, progress: Any) -> Iterator[tuple[Job, dict[str, Any]]]:
        Counting.names += [job.name for job in jobs]
        return super().each(jobs, progress)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.bench.benchmark.Workers", lambda *args: Counting())


def bench(folder: Path, rates: dict[str, float], out: str, **more: Any) -> Benchmark:
    """Create a bench of a baseline, and of recipes with other learning rates."""
    recipes = {}
    for name, rate in rates.items():
        file = folder / f"rate-{rate}.yaml"
        file.write_text(f"model: {{init_args: {{lr: {rate}}}}}\n")
        recipes[name] = [str(folder / "baseline.yaml"), str(file)]
    settings = {"target": "val_loss", "budget": "0.3rs", "seeds": 2, "rounds": 2, "evaluations": 2, "threads": 1}
    settings["reference"] = folder / "prices.json"
    return Benchmark(str(folder / "baseline.yaml"), recipes, out=folder / out, **{**settings, **more})


@pytest.fixture(scope="module")
def first(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bench of two recipes, in ``first``."""

    def run() -> str:
        folder = tmp_path_factory.mktemp("known")
        config(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_eff.bench.benchmark.Workers", lambda *args: InProcess())
            bench(folder, {"other": 0.002, "leading": 0.01}, "first").run(progress=False, report=False)
        return str(folder)

    return Path(once("bench_known", run))


def ends(results: dict[str, Any], name: str) -> dict[int, tuple[int, float]]:
    """An arm's steps and metric at the end, by seed."""
    return {run["seed"]: (run["steps"], run["points"][-1]["metric"]) for run in results["runs"] if run["arm"] == name}


def test_what_is_known_is_neither_rehearsed_nor_trained_again(first: Path, tmp_path: Path) -> None:
    Counting.names = []
    out = str(tmp_path / "second")
    second = bench(first, {"recipe": 0.01, "new": 0.03}, out, known=[first / "first"]).run(progress=False, report=False)
    rehearsed = [name for name in Counting.names if "seed" not in name]
    assert {name.rpartition("-")[0] for name in rehearsed} == {"00-baseline", "02-new"}
    assert [name for name in Counting.names if "seed" in name] == ["02-new-seed1", "02-new-seed2"]
    before = json.loads((first / "first" / "results.json").read_text())
    assert ends(second, "recipe") == ends(before, "leading") and ends(second, "baseline") == ends(before, "baseline")
    assert second["calibration"]["recipe"] == before["calibration"]["leading"]
    notes = {run["arm"]: run["notes"] for run in second["runs"]}
    assert notes["recipe"][-1] == "trained for the bench in first" and notes["new"] == [], "who reads it is told"
    assert len(ends(second, "new")) == 2 and set(second["summary"]) == {"baseline", "recipe", "new"}


def test_what_is_taken_over_is_what_training_again_comes_to(first: Path, tmp_path: Path) -> None:
    """An independent bench with the same step costs that trains everything."""
    again = bench(first, {"leading": 0.01}, str(tmp_path / "again"), reference=first / "first")
    results = again.run(progress=False, report=False)
    before = json.loads((first / "first" / "results.json").read_text())
    for name in ("baseline", "leading"):
        assert ends(results, name) == ends(before, name) and len(ends(results, name)) == 2


def test_what_has_rehearsed_stays_with_its_own_prices(first: Path, tmp_path: Path) -> None:
    """A bench that was killed before the other one was over, and goes on: none of its arms changes its steps in between."""
    begun = bench(first, {"recipe": 0.01}, str(tmp_path / "begun"))
    (tmp_path / "begun" / "rehearsals").mkdir(parents=True)
    (tmp_path / "fresh").mkdir()
    begun._begin_or_continue()
    assert begun._reuse_known() == {}
    later = bench(first, {"recipe": 0.01}, str(tmp_path / "begun"), known=[first / "first"])
    later._begin_or_continue()
    assert later._reuse_known() == {}
    fresh = bench(first, {"recipe": 0.01}, str(tmp_path / "fresh"), known=[first / "first"])
    fresh._begin_or_continue()
    taken = fresh._reuse_known()
    assert set(taken) == {"baseline", "recipe"} and len(list((tmp_path / "fresh" / "runs").iterdir())) == 4
    goes_on = bench(first, {"recipe": 0.01}, str(tmp_path / "fresh"))
    goes_on._begin_or_continue()
    assert goes_on._reuse_known() == json.loads(json.dumps(taken)), "settled as it began"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"evaluations": 3}, "evaluations"),
        ({"schedule": "linear"}, "schedule"),
        ({"budget": "0.4rs"}, "budget"),
        ({"mode": "max"}, "mode"),
    ],
)
def test_a_bench_of_another_kind_is_not_known(first: Path, tmp_path: Path, more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=rf"this bench differs in {what}, so its runs cannot be reused"):
        bench(first, {"new": 0.03}, str(tmp_path), known=[first / "first"], **more).run(progress=False, report=False)


def test_another_baseline_is_not_known(first: Path, tmp_path: Path) -> None:
    config(tmp_path, "model: {class_path: tests.tune.tasks.Regression, init_args: {weight_decay: 0.1}}")
    with pytest.raises(ValueError, match="differs in the baseline's configs, so"):
        bench(tmp_path, {"new": 0.03}, "out", known=[first / "first"]).run(progress=False, report=False)


@pytest.mark.parametrize("more", [{"reference": None}, {"budget": ["0.3rs", "0.4rs"]}, {"budget": "0.3s"}])
def test_runs_that_would_not_be_the_same_again_are_refused(first: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"since otherwise a run would not be the same again|reference-system time"):
        bench(first, {"new": 0.03}, str(tmp_path), known=[first / "first"], **more)
    with pytest.raises(ValueError, match=r"only for configs with one budget in reference-system time.*reference="):
        Benchmark(
            arm(),
            {"a": arm()},
            target="val_loss",
            budget="1rs",
            known=[first / "first"],
            reference=tmp_path / "prices.json",
        )


def test_other_prices_are_told(first: Path, tmp_path: Path) -> None:
    prices = json.loads((first / "prices.json").read_text())
    prices["entries"][0]["prices"][0]["seconds"] *= 1.01
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    for reference in (tmp_path / "prices.json", tmp_path / "none_yet.json"):
        other = bench(
            first, {"new": 0.03}, str(tmp_path / reference.stem), known=[first / "first"], reference=reference
        )
        with pytest.raises(ValueError, match=r"differs in the step costs of the reference, so"):
            other.run(progress=False, report=False)
