"""A search that is gone on with: its time, its trials, and the code that they were made of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_eff._cli.errors import UsageError
from lightning_eff._core.search_space import RunProfile
from lightning_eff.tune import tuner as tuning
from lightning_eff.tune.concluding import Finding
from lightning_eff.tune.config import Choices, digests
from lightning_eff.tune.inspection import resuming
from lightning_eff.tune.proposals.proposing import Trial
from lightning_eff.tune.space import gather
from lightning_eff.tune.timing import Timetable
from lightning_eff.tune.tuner import Tuner
from tests.tune import test_conclude as concluding
from tests.tune.tasks import Here, config
from tests.tune.test_timing import SLOW

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Here)


def test_time_before_an_end_counts_and_that_after_it_does_not(tmp_path: Path) -> None:
    anew, on = Timetable(500.0, (1.0,)), Timetable(500.0, (1.0,), before=300.0)
    assert anew.left == pytest.approx(500.0, abs=1) and on.left == pytest.approx(200.0, abs=1)
    tuner = Tuner(config(tmp_path), target="val_loss", budget=2, search=500, out=tmp_path, threads=1)
    first = tuner._seconds(SLOW, anew)
    (tmp_path / "clock.json").write_text(json.dumps({"seconds": first, "longest": 1.0}))
    tuner.search = 900.0  # and more of it
    more = Timetable(900.0, (1.0,), before=300.0)
    assert tuner._seconds(SLOW, more) == pytest.approx(first + more.left - more.kept(SLOW), abs=1)


def test_what_was_begun_is_ended_though_its_time_is_over(tmp_path: Path) -> None:
    """The same benches as before, and no others."""
    good, bad = concluding.GOOD, concluding.BAD
    search = concluding.searched(tmp_path, {tuple(sorted((good, bad))): 0.5, (good,): 0.6})

    def asked(*known: str) -> dict[str, dict[str, list[str]]]:
        bench = concluding.FakeBench()
        bench.known = set(known)
        Finding(concluding.Look, search, bench, lambda arms, known: 100.0, lambda: -50.0).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
        return bench.asked

    assert list(asked()) == ["confirm"]
    assert list(asked("confirm", "leave_one_out")) == ["confirm", "leave_one_out"]
    assert list(asked("confirm", "leave_one_out", "reduced")) == ["confirm", "leave_one_out", "reduced"]


def test_as_many_recipes_as_were_begun_are_confirmed(tmp_path: Path) -> None:
    search = concluding.searched(tmp_path, {})
    best = [Choices(techniques={name: {}}) for name in (concluding.GOOD, concluding.BAD)]

    class Begun(concluding.FakeBench):
        def begun(self, name: str, arms: dict[str, Choices]) -> bool:
            return name == "confirm" and len(arms) == count

    for count in (1, 2):
        for left in (-50.0, 1e6):
            finding = Finding(concluding.Look, search, Begun(), lambda arms, known: 100.0, lambda left=left: left)  # pyright: ignore[reportArgumentType]
            assert len(finding._few(best)) == count


def test_trials_keep_their_space_when_not_all_was_tried_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A technique that would be refused now may stand in their parameters."""
    names = [f"tests.tune.tasks.{name}" for name in ("Neutral", "Refusing")]
    monkeypatch.setattr(tuning, "PROBING", 0.0)
    tuner = Tuner(
        config(tmp_path), target="val_loss", budget=2, search=1e6, include=names, out=tmp_path / "out", threads=1
    )
    assert sorted(tuner._look(lambda line: None, Timetable(1e6, (1.0,))).space.techniques) == names, "none was tried"
    monkeypatch.setattr(tuning, "PROBING", 0.2)
    (tmp_path / "out" / "trials.json").write_text("{}")
    assert sorted(tuner.look().space.techniques) == names
    (tmp_path / "out" / "trials.json").unlink()
    assert list(tuner.look().space.techniques) == names[:1], "without trials it is tried"


def test_what_json_makes_of_tuples_is_in_the_space_still() -> None:
    space = gather(RunProfile(image_side=8, manual_optimization=True), (), {}, include=["DiffAugment"])
    one = space.techniques["DiffAugment"]
    name, what = next((name, what) for name, what in one.space.settings.items() if isinstance(what.corners()[0], tuple))
    values = {key: setting.corners()[0] for key, setting in one.space.settings.items()}
    trial = Trial("recipes", 0, 0, {}, Choices({"betas": (0.9, (0.5, 1))}, {"DiffAugment": values}))
    read = Trial.of(json.loads(json.dumps(trial.record())))
    assert read.choices == trial.choices and what.holds(list(values[name]))
    assert read.choices.key == trial.choices.key and one.config(
        read.choices.techniques["DiffAugment"], space.profile
    ) == one.config(values, space.profile)
    assert one.config({**values, name: list(values[name])}, space.profile) == one.config(values, space.profile)


def module(folder: Path, peak: str) -> Path:
    """A module of one's own in a folder, with a config of it."""
    (folder / "own_module_of_a_search.py").write_text(
        "from tests.tune.tasks import Regression\n\n\nclass Own(Regression):\n    def __init__(self):\n"
        f"        super().__init__(lr={peak})\n"
    )
    file = folder / "baseline.yaml"
    file.write_text(
        "trainer: {accelerator: cpu, devices: 1}\nmodel: {class_path: own_module_of_a_search.Own}\n"
        "data: {class_path: tests.tune.tasks.Table}\n"
    )
    return file


def test_code_that_was_mended_is_looked_at_anew_and_not_mixed_with_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file, out = module(tmp_path, "3e-3"), tmp_path / "out"
    tuner = Tuner(file, target="val_loss", budget=2, include=["tests.tune.tasks.Neutral"], out=out, threads=1)
    tuner.look()
    profile, before = (out / "profile.json").read_text(), json.loads((out / "code.json").read_text())
    assert [Path(path).name for path in before] == ["own_module_of_a_search.py", "tasks.py", "tasks.py"][:2]
    tuner.look()
    assert (out / "profile.json").read_text() == profile
    (out / "profile.json").write_text(profile.replace('"steps"', '"steps_of_old"'))
    module(tmp_path, "1e-3")
    tuner.look()
    assert "steps_of_old" not in (out / "profile.json").read_text(), "the old profile does not count"
    (out / "trials.json").write_text("{}")
    tuner.look()
    module(tmp_path, "2e-3")
    with pytest.raises(UsageError, match=r"holds trials of other code: \S*own_module_of_a_search.py changed"):
        tuner.look()


def test_a_class_without_a_file_has_no_digest() -> None:
    config = {"model": {"class_path": "builtins.dict"}, "data": None, "trainer": {"callbacks": None}}
    assert digests(config, ["Muon", "no.such.Thing"]) == {}


def test_a_rate_that_peaks_late_is_refused_before_anything_is_searched(tmp_path: Path) -> None:
    text = "model: {class_path: tests.tune.tasks.Regression, init_args: {warmup_steps: 2}}"
    tuner = Tuner(
        config(tmp_path, text),
        target="val_loss",
        budget=2,
        search=1e6,
        include=["tests.tune.tasks.Neutral"],
        space={"own": {"warm_up": False}},
        out=tmp_path / "out",
        threads=1,
    )
    time = Timetable(1e6, (1.0,))
    tuner._look(lambda line: None, time)
    late = json.loads((tmp_path / "out" / "profile.json").read_text())
    late["rate"]["peak_at"] = 0.6
    (tmp_path / "out" / "profile.json").write_text(json.dumps(late))
    with pytest.raises(ValueError, match="still rises at 60% of the budget"):
        tuner._look(lambda line: None, time)
    tuner.look()  # which searches nothing
    other = Tuner(
        tuner.paths, target="val_loss", budget=2, search=1e6, include=tuner.include, out=tmp_path / "out", threads=1
    )
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    plan["plan"]["space"] = {}
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    look = other._look(lambda line: None, time)
    assert any(one.name == "warm_up" for one in look.space.own), "a warm-up that is searched is shortened there"
    assert replace(look.found) == look.found


def test_a_kill_while_the_plan_is_written_leaves_a_folder_to_begin_in(tmp_path: Path) -> None:
    machine = dict.fromkeys(resuming.SAME, "one")
    (tmp_path / "plan.0123abcd.tmp").write_text("{")
    resuming.start_or_resume(tmp_path, {"seed": 0}, machine)
    (tmp_path / "plan.4567abcd.tmp").write_text("{")
    resuming.start_or_resume(tmp_path, {"seed": 1}, machine)
    assert json.loads((tmp_path / "plan.json").read_text())["plan"] == {"seed": 1}, "nothing was found for the other"
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="differs in seed"):
        resuming.start_or_resume(tmp_path, {"seed": 2}, machine)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(UsageError, match="holds other files"):
        resuming.start_or_resume(tmp_path, {"seed": 2}, machine)


def test_what_could_not_be_used_leaves_no_folder_that_refuses_the_next(tmp_path: Path) -> None:
    names = ["tests.tune.tasks.Neutral"]
    wrong = Tuner(config(tmp_path), target="val_los", budget=2, include=names, out=tmp_path / "out", threads=1)
    with pytest.raises(ValueError, match="val_los"):
        wrong.look()
    Tuner(config(tmp_path), target="val_loss", budget=2, include=names, out=tmp_path / "out", threads=1).look()
