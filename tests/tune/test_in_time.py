"""A search in its time: runs that do not fit are not begun, rehearsals are shared, and all cores work."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.tune import arguments
from lightning_eff.tune.arguments import at_once, in_memory
from lightning_eff.tune.config import Choices
from lightning_eff.tune.inspection.looking import Look
from lightning_eff.tune.outcomes import Outcome
from lightning_eff.tune.search import RUNGS, Search
from lightning_eff.tune.trials import Trials
from lightning_eff.tune.tuner import Tuner
from tests.tune.tasks import Here, config
from tests.tune.test_search import Objective, space

pytest.importorskip("optuna")
LOOKAHEAD = {"interval": 5, "alpha": 0.5}


class Clock:
    """A clock on which a run takes as many seconds as its budget, and one with the technique A three times as many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("lightning_eff.tune.search.time.monotonic", lambda: self.now)

    def __call__(self, choices: Choices, budget: float) -> Outcome:
        self.now += budget * (3 if "A" in choices.techniques else 1)
        return Objective()(choices, budget)


@pytest.mark.parametrize("seconds", range(100, 300, 20))
def test_a_run_that_would_end_late_is_not_begun(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search(space(), Clock(monkeypatch), tmp_path, mode="min", budget=9.0, seconds=seconds)
    search.search()
    assert search.best("baseline") is not None and search.best("recipes") is not None
    assert seconds - 39.0 < search.spent <= seconds, "the longest trial takes 39 s"


def test_a_run_that_the_end_of_the_time_ends_is_run_when_the_search_is_resumed(tmp_path: Path) -> None:
    late: list[str] = []

    def ended(choices: Choices, budget: float) -> Outcome:
        if len(late) or len(list((tmp_path / "outcomes").iterdir())) >= 12:
            late.append(choices.key)
            return Outcome(None, over=True)
        return Objective()(choices, budget)

    first = Search(space(), ended, tmp_path, mode="min", budget=9.0, seconds=1e6, limit=8)
    first.search()
    assert late and [trial["state"] for trial in first.trials()].count("running") >= 1
    assert not any(trial["crashed"] for trial in json.loads((tmp_path / "trials.json").read_text())["trials"])
    again = Search(space(), Objective(), tmp_path, mode="min", budget=9.0, seconds=1e6, limit=8)
    again.search()
    straight = Search(space(), Objective(), tmp_path / "straight", mode="min", budget=9.0, seconds=1e6, limit=8)
    straight.search()
    assert again.trials() == straight.trials()


def test_all_cores_work_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    assert (at_once(0), at_once(1), at_once(6), at_once(99)) == (arguments.MOST, 16, 2, 1)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 100}.__getitem__)
    assert (in_memory(10), in_memory(35), in_memory(90)) == (7, 2, 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    made = {"target": "val_loss", "budget": 2, "out": tmp_path / "out"}
    assert Tuner(config(tmp_path), threads=8, **made).jobs == 2
    assert Tuner(config(tmp_path), threads=8, jobs=1, **made).jobs == 1


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    folder = tmp_path_factory.mktemp("look")
    names = ["Lookahead", "StochasticWeightAveraging"]
    tuner = Tuner(config(folder), target="val_loss", budget=2, include=names, out=folder / "out", threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_eff.tune.tuner.Places", Here)
        return tuner.look()


class Counting(Here):
    """Counts the jobs by their kinds."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def do(self, jobs: Any, progress: Any = None) -> Any:
        self.names += [job.name.partition("-")[2] for job in jobs]
        return super().do(jobs, progress)


def made(look: Look, folder: Path) -> tuple[Trials, Counting]:
    places = Counting()
    more: dict[str, Any] = {"target": "val_loss", "budget": 2, "seed": 0, "threads": 1}
    return Trials(look.recipes, look.found, places, folder, **more), places  # pyright: ignore[reportArgumentType]


def test_choices_of_the_same_step_cost_share_a_rehearsal(look: Look, tmp_path: Path) -> None:
    trials, places = made(look, tmp_path)
    for own in ({"rate": 1e-3}, {"rate": 3e-3, "weight_decay": 0.02}, {"warm_up": 0.2}):
        assert trials.rehearsed(Choices(own)) == bool(places.names)
        assert trials._rehearsed(Choices(own))["status"] == "finished"
    assert places.names == ["again", "rehearsal"]
    trials._rehearsed(Choices({"rate": 1e-3, "batch": 32}))
    trials._rehearsed(Choices({"rate": 1e-3}, {"Lookahead": LOOKAHEAD}))
    assert places.names == ["again", "rehearsal"] * 3, "another batch or technique costs something else"


def test_a_rehearsal_that_failed_is_not_shared(look: Look, tmp_path: Path) -> None:
    trials, _ = made(look, tmp_path)
    assert trials._rehearsed(Choices({"rate": 1e30}))["status"] == "diverged"
    assert trials._rehearsed(Choices({"rate": 1e-3}))["status"] == "finished"


def test_a_recipe_is_checked_for_leaks_before_its_second_budget(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, places = made(look, tmp_path)
    choices = Choices({"rate": 3e-3}, {"Lookahead": LOOKAHEAD})
    first, second, whole = (2 * rung / RUNGS[-1] for rung in RUNGS)
    assert trials(choices, first).value is not None and "rehearsal-blind" not in places.names
    found = iter(["it learns from validation data", None])
    monkeypatch.setattr("lightning_eff.tune.trials.leaks", lambda *losses: next(found))
    ended = trials(choices, second)
    assert ended.refused and str(ended.why).endswith("it learns from validation data")
    monkeypatch.undo()
    places.names.clear()
    assert trials(choices, second).value is not None and trials(choices, whole).value is not None
    assert places.names.count("rehearsal-blind") == 1
