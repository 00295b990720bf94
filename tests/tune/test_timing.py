"""How long the parts of a search take, what is refused for want of time, and what is left out of a confirmation."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.pace import Incomparable
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.tune.concluding import Finding
from lightning_eff.tune.config import Choices
from lightning_eff.tune.inspection.probing import reason
from lightning_eff.tune.inspection.resuming import start_or_resume
from lightning_eff.tune.search import Search
from lightning_eff.tune.timing import Durations, Timetable, in_words
from lightning_eff.tune.tuner import Tuner
from tests.tune import test_conclude as concluding
from tests.tune.tasks import config

pytest.importorskip("optuna")

SLOW = Durations(budget=60.0, step=0.1, start=2.0, validation=0.5, process=5.0, seeds=3, jobs=1)


def test_a_trial_and_a_bench_take_what_their_parts_take() -> None:
    rehearsal = 2.0 + 30 * 0.1  # a twentieth of 600 steps
    assert SLOW.rehearsal == pytest.approx(rehearsal)
    runs = (2.0 + 60 / 9 + 2 * 0.5) + (2.0 + 20 + 2 * 0.5) + (2.0 + 60 + 2 * 0.5)
    assert SLOW.trial((1 / 9, 1 / 3, 1)) == pytest.approx(2 * rehearsal + 0.5 + runs)
    bench = (5.0 + 2.0 + 8 * 0.1) + 2 * (5 * rehearsal + 0.5) + 6 * (5.0 + 2.0 + 60 + 10 * 0.5)
    assert SLOW.bench(2) == pytest.approx(bench)
    assert SLOW.bench(4, known=2) == pytest.approx(bench + 5 * rehearsal + 0.5), (
        "two of four are trained, and the baseline rehearses beside them"
    )
    assert in_words(90) == "90 s" and in_words(3601) == "61 min" and in_words(9000) == "2.5 h"


def test_a_search_in_which_nothing_can_be_confirmed_is_refused_with_what_it_needs() -> None:
    need = 2 * SLOW.trial((1.0,)) + SLOW.bench(3)
    with pytest.raises(
        UsageError, match=r"too short to confirm anything\. .* Set --search to \d+s or more, or --budget"
    ) as no:
        Timetable(need - 10, (1.0,)).check(SLOW)
    said = re.search(r"--search to (\d+)s or more, or --budget to (\d+)s or less\.$", str(no.value))
    assert said is not None and int(said[1]) == pytest.approx(need, abs=2)
    Timetable(need - 10, (1.0,)).check(replace(SLOW, budget=float(said[2])))
    with pytest.raises(UsageError):
        Timetable(need - 10, (1.0,)).check(replace(SLOW, budget=float(said[2]) + 2))
    with pytest.raises(UsageError, match=r"Set --search to \d+s or more\.$"):
        Timetable(20.0, (1.0,)).check(SLOW)  # no budget is short enough
    Timetable(need + 1, (1.0,)).check(SLOW)
    Timetable(need - 10, (1.0,)).check(replace(SLOW, jobs=2))
    Timetable(None, (1.0,)).check(SLOW)


def test_what_will_end_late_is_said_at_the_start() -> None:
    short, long = Timetable(200.0, (1.0,)), Timetable(1e5, (1.0,))
    assert short.kept(SLOW) == pytest.approx(200.0, abs=1), "all of it, where confirming one recipe takes more"
    half = 3 * SLOW.bench(3)
    assert Timetable(half, (1.0,)).kept(SLOW) == pytest.approx(half / 2, abs=1), "half, where confirming all takes more"
    one = 1.5 * SLOW.bench(3)
    assert Timetable(one, (1.0,)).kept(SLOW) == pytest.approx(SLOW.bench(3)), "no less than one recipe takes"
    whole = SLOW.bench(5) + SLOW.bench(5, known=2) + SLOW.bench(3, known=1)
    assert long.kept(SLOW) == pytest.approx(whole) and whole < SLOW.bench(5) + 2 * SLOW.bench(3)
    told = short.describe(SLOW, 100.0)
    assert told.startswith("100 s for trials (about 1 recipes")
    assert f"about {in_words(SLOW.bench(3))} to confirm one recipe on 3 seeds; it may end" in told
    assert "late" not in long.describe(SLOW, long.left - long.kept(SLOW))
    assert short.describe(SLOW, 100.0, again=True) == "100 s of --search are left for trials", "confirming may be over"


def test_steps_that_are_too_slow_are_told_of_after_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model: {class_path: tests.tune.tasks.Waiting, init_args: {pause: 0.3}}"
    pauses: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    with pytest.raises(
        Incomparable, match=r"Raise --budget to \d+s or more\. With a budget of \d+ s, a search takes at least"
    ):
        Tuner(config(tmp_path, text), target="val_loss", budget=0.5, out=tmp_path / "out", threads=1).look()
    assert pauses.count(0.3) == 3


def test_unknown_names_are_told_before_anything_runs_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_eff.tune.inspection.profiling.look", lambda *args, **more: pytest.fail("it ran"))
    for more in (
        {"include": ["Muonn"]},
        {"exclude": ["Lokahead"]},
        {"space": {"techniques": {"Lookahead": {"intervall": [5]}}}},
        {"space": {"own": {"rate": {"low": 2, "high": 1}}}},
        {"space": {"most": 0}},
    ):
        with pytest.raises(UsageError):
            Tuner(config(tmp_path), target="val_loss", budget=2, out=tmp_path / "out", **more).look()
        assert not (tmp_path / "out").exists()


def took(tuner: Tuner) -> None:
    start_or_resume(tuner.out, tuner._plan(), fingerprint(tuner.threads))


def test_a_folder_in_which_nothing_was_found_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Tuner(config(tmp_path), target="val_los", budget=2, out=tmp_path / "out", threads=1)
    took(first)
    second = Tuner(first.paths, target="val_loss", budget=2, out=tmp_path / "out", threads=1)
    took(second)
    (tmp_path / "out" / "profile.json").write_text("{}")
    with pytest.raises(UsageError, match="differs in target"):
        took(first)


def test_time_for_trials_stays_when_a_search_goes_on(tmp_path: Path) -> None:
    tuner = Tuner(config(tmp_path), target="val_loss", budget=2, search=500, out=tmp_path, threads=1)
    late = Timetable(500, (1.0,))
    late._began -= 100
    seconds = tuner._seconds(SLOW, late)
    assert tuner._seconds(SLOW, Timetable(500, (1.0,))) == seconds, "though less of it was for looking this time"
    tuner.search = 1000.0
    assert tuner._seconds(SLOW, Timetable(1000, (1.0,))) > seconds


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        ("crashed", "LossNotVisible: MESA: no classes.", "MESA: no classes."),
        ("crashed", "KeyError: 'labels'", "KeyError: 'labels'"),
        ("crashed", "ValueError: got\n  two lines", "got two lines"),
        ("refused", "MESA: no classes.", "MESA: no classes."),
    ],
)
def test_a_reason_says_no_more_than_it_must(status: str, error: str, told: str) -> None:
    assert reason({"status": status, "error": error}) == told


# -- confirming in the time that is left


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    good, bad = concluding.GOOD, concluding.BAD
    values = {tuple(sorted((good, bad))): 0.5, (good,): 0.6}
    return concluding.searched(tmp_path_factory.mktemp("search"), values)


def conclude(search: Search, left: float, bench: Any, seconds: float = 100.0) -> tuple[Any, list[str]]:
    lines: list[str] = []
    finding = Finding(concluding.Look, search, bench, lambda arms, known: seconds * (arms - known), lambda: left)
    return finding.conclude(lines.append), lines


def test_what_does_not_fit_into_the_time_left_is_not_begun_and_said(search: Search) -> None:
    bench = concluding.FakeBench()
    found, lines = conclude(search, 150.0, bench)
    assert list(bench.asked) == ["confirm"] and found.recipe is not None and len(found.recipe.techniques) == 2
    assert (
        "The gain of each technique was not measured: it takes about 4 min, and 3 min of --search were left"
        in found.sentence
    )
    assert lines[0].endswith("; about 5 min")
    bench = concluding.FakeBench()
    found, _ = conclude(search, 1e6, bench)
    assert list(bench.asked) == ["confirm", "leave_one_out", "reduced"] and "not measured" not in found.sentence


@pytest.mark.parametrize(
    ("left", "recipes", "benches"),
    [
        (1e6, 2, ["confirm", "leave_one_out", "reduced"]),
        (550.0, 1, ["confirm", "leave_one_out", "reduced"]),  # two take 500 s, and leaving out 200
        (250.0, 1, ["confirm", "leave_one_out", "reduced"]),  # one takes 300 s, which is late in any case
        (150.0, 1, ["confirm"]),
    ],
)
def test_what_a_technique_adds_comes_before_another_recipe(
    tmp_path: Path, left: float, recipes: int, benches: list[str]
) -> None:
    good, bad = concluding.GOOD, concluding.BAD
    search = concluding.searched(tmp_path, {tuple(sorted((good, bad))): 0.5, (good,): 0.6})
    stack, alone = Choices(techniques={good: {}, bad: {}}), Choices(techniques={good: {}})
    bench = concluding.FakeBench()
    finding = Finding(concluding.Look, search, bench, lambda arms, known: 100.0 * (arms - known), lambda: left)
    assert len(finding._few([stack, alone])) == recipes
    finding._run("confirm", {"recipe": stack}, "confirming")
    finding._reduced(stack, bench.run("confirm", {"recipe": stack}, controls=True)["summary"]["recipe"], 100)
    assert list(bench.asked) == benches


def test_what_cannot_be_compared_leaves_the_baseline(search: Search) -> None:
    class Refusing(concluding.FakeBench):
        def run(self, name: str, arms: Any, *, controls: bool) -> Any:
            raise Incomparable("recipe: got validation data of another make")

    found, _ = conclude(search, 1e6, Refusing())
    assert (
        found.recipe is None
        and "cannot be compared with it on new seeds: recipe: got validation data" in found.sentence
    )
