"""Small studies: continuation after a kill, missing runs, and their page."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import study
from benchmarks.augmentation import SUBJECT as AUGMENTATION
from benchmarks.study import BASELINE, Study, Subject, config_of, fit, page

SEEDS = (1, 2, 3)


def subject(folder: Path) -> Subject:
    return Subject(
        name="toy",
        title="A toy",
        words="No network at all.",
        folder=folder,
        tasks={"one": "The task"},
        arms=("twice", "worse"),
        budgets={"one": 1.0},
        rates={"one": ("0.1", "0.2")},
        controls={"twice": "worse"},
        home=folder,
    )


def falling(rate: float, seconds: float = 1.0, accuracy: float = 0.5) -> list[dict[str, Any]]:
    """Eight points of a loss that falls from 1 by ``rate`` a second."""
    times = [seconds * i / 8 for i in range(1, 9)]
    return [{"steps": i, "seconds": t, "val_loss": 1 - rate * t, "val_accuracy": accuracy} for i, t in enumerate(times)]


def kept(of: Subject) -> dict[str, Any]:
    runs = []
    for seed in SEEDS:
        for arm, rate, accuracy in ((BASELINE, 0.2, 0.5), ("twice", 0.4, 0.6), ("worse", 0.1, 0.4)):
            points = falling(rate * (1 + 0.01 * seed), accuracy=accuracy + 0.001 * seed)
            runs.append({"arm": arm, "seed": seed, "steps": 8, "points": points})
    settings = {"budgets": dict(of.budgets), "rounds": 3, "rates": {}}
    tuning = {"0.1": {"val_loss": 0.5}}
    return {"settings": settings, "machine": {}, "seeds": 3, "tasks": {"one": {"tuning": tuning, "runs": runs}}}


def test_the_page_says_what_the_runs_say(tmp_path: Path) -> None:
    of = subject(tmp_path)
    lines = {line.split("|")[1].strip(): line for line in page(of, kept(of)).splitlines() if line.startswith("| `")}
    assert set(lines) == {"`baseline`", "`twice`", "`worse`"}
    cells = [cell.strip() for cell in lines["`twice`"].split("|")[1:-1]]
    assert cells[1:3] == ["3", "8"] and cells[4] == "60.2 %"
    assert cells[5].startswith("+10.0 ") and cells[6] == "0.50 s"
    assert cells[7].startswith("2.00 ") and cells[8] == "faster"
    assert cells[9].startswith("4.00 ") and cells[9].endswith("faster (`worse`)")
    worse = [cell.strip() for cell in lines["`worse`"].split("|")[1:-1]]
    assert worse[6] == "not reached" and worse[7].startswith("0.50 ") and worse[8] == "slower"
    assert "Incomplete" not in page(of, kept(of))
    fewer = kept(of)
    fewer["tasks"]["one"]["runs"].pop()
    assert "**Incomplete**: 8 of 9 runs exist." in page(of, fewer)


def test_a_killed_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int]] = []

    def train(config: dict[str, Any], seed: int, steps: int, evaluations: int) -> dict[str, Any]:
        if evaluations:
            made.append((config["arm"], seed, steps))
            if len(made) == 5:
                raise KeyboardInterrupt
        return {"steps": [0.01] * steps, "points": falling(0.2 + 0.01 * len(made)) if evaluations else []}

    def config(folder: Path, task: str, arm: str, rate: float | None = None) -> dict[str, Any]:
        return {"arm": arm, "rate": rate}

    monkeypatch.setattr(study, "fit", train)
    monkeypatch.setattr(study, "config_of", config)
    of = subject(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Study(of, seeds=3, rounds=2).go_on()
    assert len(json.loads(of.results.read_text())["tasks"]["one"]["runs"]) == 2  # after two points of tuning
    Study(of, seeds=3, rounds=2).go_on()
    runs = json.loads(of.results.read_text())["tasks"]["one"]["runs"]
    assert sorted((run["arm"], run["seed"]) for run in runs) == sorted(
        (a, s) for a in ("baseline", "twice", "worse") for s in SEEDS
    )
    assert len(made) == 2 + 9 + 1, "what was there was trained again, beside what was killed"
    assert {steps for *_, steps in made} == {100}, "a second of steps of ten milliseconds"
    with pytest.raises(SystemExit, match="and not of"):
        Study(of, seeds=3, rounds=4)


@pytest.mark.parametrize(
    "task", [task if task == "digits" else pytest.param(task, marks=pytest.mark.slow) for task in AUGMENTATION.tasks]
)
@pytest.mark.parametrize("arm", [BASELINE, *AUGMENTATION.arms])
def test_each_augmentation_trains(task: str, arm: str) -> None:
    run = fit(config_of(AUGMENTATION.folder, task, arm, 1e-3), 0, 2, 1)
    assert len(run["steps"]) == 2 and 0 <= run["points"][-1]["val_accuracy"] <= 1
