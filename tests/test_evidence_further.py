"""Single techniques without a recipe on the reference tasks: they train, and what is told of them is what was found."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

import lightning_eff
from benchmarks import evidence, evidence_further, evidence_page
from benchmarks.evidence_arms import SHORT, TASKS
from tests.test_benchmarks import parsed

ROOT = Path(__file__).parent.parent
EVERY = [(task, one) for task in TASKS for one in evidence_further.settings(task)]
SLOW = ("MetaInit", "DifficultyPacing")  #: look at all data, or train, before the first step


def slow(task: str, one: evidence_further.Setting) -> bool:
    """Whether training with it is no test of every day: of each technique, its paper's settings are trained once."""
    if one.of in SLOW or one.name not in evidence_further.papers(evidence_further.settings(task)):
        return True
    earlier = [
        other for before in list(TASKS)[: list(TASKS).index(task)] for other in evidence_further.settings(before)
    ]
    return one.of in {other.of for other in earlier}


def test_settings_are_ones_that_their_techniques_take() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    for task, one in EVERY:
        said = one.callback | {
            "class_path": f"lightning_eff.{one.callback['class_path'].removeprefix('lightning_eff.')}"
        }
        made = parser.instantiate_classes(parser.parse_object({"callback": said})).callback
        assert type(made).__name__ == one.of or one.of in str(one.callback), (task, one)


@pytest.mark.parametrize(
    ("task", "one"),
    [pytest.param(task, one, marks=pytest.mark.slow if slow(task, one) else ()) for task, one in EVERY],
    ids=[f"{task}-{one.name}" for task, one in EVERY],
)
@pytest.mark.filterwarnings(
    "ignore:SAF.lag=3.. the run ends", "ignore:DataPruning.epochs=6.. the run ends"
)  # in 2 steps
def test_settings_train(task: str, one: evidence_further.Setting, tmp_path: Path) -> None:
    (overlay,) = evidence_further.overlays(task, [one.name], tmp_path)
    cli = parsed(task, str(overlay.with_suffix("")), tmp_path)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.global_step == 2
    names = {type(callback).__name__ for callback in cli.trainer.callbacks}  # type: ignore[attr-defined]
    own = one.callback["class_path"].rpartition(".")[2]
    assert own in names and (own == one.of or one.of in str(one.callback)), "they are of what they are told to be"


def test_each_has_words_and_a_technique_and_is_not_what_the_other_tables_have() -> None:
    for task, one in EVERY:
        assert hasattr(lightning_eff, one.of) and one.told and not one.told.endswith("."), one
        recipe = ROOT / "benchmarks" / task / "recipes" / f"{one.name}.yaml"
        if recipe.is_file():
            (callback,) = yaml.safe_load(recipe.read_text())["trainer"]["callbacks"]
            assert callback["class_path"] == one.callback["class_path"]
    for task in {task for task, _ in EVERY}:
        measured = {told[0] for every in (evidence.CLAIMS, evidence.WEIGHTS) for told in every.values()}
        assert not measured & {one.of for one in evidence_further.settings(task)}


def arms(**finals: float | None) -> dict[str, Any]:
    """Results of a bench whose arms ended so."""
    summary = {
        name: {"final": {"mean": end}, "throughput": {"estimate": 9.0}, "verdict": f"as {name}"}
        for name, end in finals.items()
    }
    runs = [
        {
            "arm": name,
            "status": "failed" if end is None else "finished",
            "samples": 100 * (1 + (name != "baseline")),
            "seconds": 30.0,
        }
        for name, end in finals.items()
    ]
    plan = {"budget": {"seconds": 30.0}, "arms": [{"name": name} for name in finals]}
    return {"plan": plan, "summary": summary, "runs": runs}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[evidence_further.Setting]:
    every = [
        evidence_further.Setting("lion", "Lion", "the paper's", {}),
        evidence_further.Setting("lion_third", "Lion", "more of it", {}),
        evidence_further.Setting("adan", "Adan", "as it is", {}),
        evidence_further.Setting("adan_more", "Adan", "more", {}),
        evidence_further.Setting("lsuv", "LSUV", "once", {}),
    ]
    monkeypatch.setattr(evidence_further, "settings", lambda task: every if task == "gpt" else [])
    return every


def test_what_is_run_is_the_papers_and_what_a_search_found_better(made: list[evidence_further.Setting]) -> None:
    assert evidence_further.to_run(made, None) == ["lion", "adan", "lsuv"]
    searched = arms(baseline=1.5, lion=1.4, lion_third=1.3, adan=1.4, adan_more=1.6)
    assert evidence_further.to_run(made, searched) == ["lion", "lion_third", "adan", "lsuv"]
    assert evidence_further.found(made, searched) == {"Lion": ("lion_third", 2), "Adan": ("adan", 2)}


def test_a_line_for_each_setting_and_its_technique(made: list[evidence_further.Setting]) -> None:
    results = arms(baseline=1.5, lion=1.45, lion_third=1.4, adan=1.6, lsuv=None)
    searched = arms(baseline=1.5, lion=1.4, lion_third=1.3, adan=1.4, adan_more=1.6)
    rows = evidence_further.rows("gpt", results, searched)
    assert [(of, settings, one["verdict"]) for of, settings, one in rows] == [
        ("Lion", "the paper's", "as lion"),
        ("Lion", "more of it (best of 2)", "as lion_third"),
        ("Adan", "as it is (best of 2)", "as adan"),
        ("LSUV", "once", "as lsuv"),
    ]
    assert not any("best" in settings for _, settings, _ in evidence_further.rows("gpt", results, None))


def test_which_settings_are_shown_is_told_by_the_search_and_not_by_where_they_ended(
    made: list[evidence_further.Setting],
) -> None:
    results = arms(baseline=1.5, lion=1.45, lion_third=1.6, adan=1.6, adan_more=1.4)
    searched = arms(baseline=1.5, lion=1.4, lion_third=1.3, adan=1.4, adan_more=1.6)
    told = evidence_further.shown("gpt", results, searched)
    assert {of: [one.name for one in every] for of, every in told.items()} == {
        "Lion": ["lion", "lion_third"],
        "Adan": ["adan"],
    }
    assert [evidence_further.label(one, made) for one in told["Lion"]] == ["", ", more of it"]


def test_what_was_run_is_what_the_search_says() -> None:
    for task, (results, searched) in evidence_page.further().items():
        names = {arm["name"] for arm in results["plan"]["arms"][1:]}
        run = [
            one for one in evidence_further.settings(task) if one.of in evidence_further.shown(task, results, searched)
        ]
        assert names >= set(evidence_further.to_run(run, searched)), SHORT[task]
        assert results["plan"]["budget"]["clock"] == "reference" and len(results["plan"]["seeds"]) >= 3
        for one in evidence_further.settings(task):
            if one.name in names:
                (arm,) = (arm for arm in results["plan"]["arms"] if arm["name"] == one.name)
                assert yaml.safe_load(arm["configs"][-1]) == {"trainer": {"callbacks": [one.callback]}}
