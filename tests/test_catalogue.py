"""The catalogue: what the surveys name, what does it here, and what the command line says of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.making import facts
from lightning_eff import cli
from lightning_eff._catalogue import catalogue, collecting
from lightning_eff._catalogue.facts import facts as read_facts
from lightning_eff._catalogue.row import GROUPS, Row
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes
from tests.cases import CASES

ROOT = Path(__file__).parent.parent
ENTRIES = catalogue.entries()
SHOWN = {name for entry in ENTRIES for name in entry.by}


def test_every_technique_stands_in_it_and_once_for_each_row() -> None:
    missing = {cls.__name__ for cls in technique_classes()} - SHOWN
    assert not missing, "a class without a place: its survey, or a row of lightning_eff/_catalogue, gives it one"
    assert set(public.HOMES) >= SHOWN
    names = [(entry.group, entry.name) for entry in ENTRIES]
    assert len(set(names)) == len(names)
    beside = {name for entry in ENTRIES if entry.group == "beside" for name in entry.by}
    assert beside >= {name for name in CASES if CASES[name].outside_surveys}


def test_groups_stand_in_the_surveys_order() -> None:
    order = [entry.group for entry in ENTRIES]
    assert list(dict.fromkeys(order)) == list(GROUPS)
    assert [entry.name for entry in ENTRIES][:4] == ["Cutout", "Random Erasing", "Mixup", "CutMix"]


def test_every_row_says_what_does_it_or_why_nothing_does() -> None:
    for entry in ENTRIES:
        assert (entry.status == catalogue.BUILT) == bool(entry.by)
        assert (entry.status == catalogue.ABSENT) == bool(entry.why)
        assert entry.source or entry.group == "beside", entry
        assert not entry.by or (entry.paper and entry.saves and entry.constraints), entry
    for rows in collecting.ROWS.values():
        assert all(not (row.by and row.absent) for row in rows)


def test_the_tests_that_it_names_are_there() -> None:
    """Else run ``python -m docs.making facts``, which finds those off the usual place."""
    assert [entry.tests for entry in ENTRIES if entry.by and not (ROOT / entry.tests).is_file()] == []


def test_its_verdicts_are_those_of_the_committed_results() -> None:
    """Else run ``python -m docs.making facts``; ``make evidence`` does."""
    assert read_facts()["measured"] == facts.measured()
    (stacking,) = (entry for entry in ENTRIES if entry.name == "progressive stacking")
    told = facts.committed()["bench"]["gpt"]["summary"]["stacking"]
    assert stacking.measured["GPT"].endswith(told["verdict"])
    assert stacking.measured["GPT"].startswith(f"{told['speedup']['estimate']:.2f}")


def test_a_setting_that_a_row_names_is_one_of_its_class() -> None:
    shapes = [re.fullmatch(r"shape='(\w+)'", row.how) for row in collecting.ROWS["budget"]]
    found = [match[1] for match in shapes if match is not None]
    assert len(found) >= 5
    for shape in found:
        public.found("LearningRateSchedule")(shape)


def test_a_class_that_comes_later_is_found_by_its_name_or_by_its_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that waits for a class, one whose class says so itself, and a class of which no row knows."""
    monkeypatch.setitem(collecting.ROWS, "growth", (Row("DropIn", "–"), Row("mixture of depths", "–", ("Unheard",))))
    found = {entry.name: entry for entry in collecting.collected() if entry.group == "growth"}
    assert found["DropIn"].by == ("DropIn",), "by its survey"
    assert found["mixture of depths"].status == catalogue.NOT_YET
    assert found["layer freezing"].by == ("LayerFreezing",), "no row names it: its folder's group has it"


def test_the_file_has_what_the_classes_declare() -> None:
    """Else run ``python -m docs.making facts``."""
    assert facts.ENTRIES.read_text() == facts.entries()


def test_the_table_is_printed_without_torch() -> None:
    code = "import sys; from lightning_eff.cli import main; main(['techniques']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# -- the command line


def test_techniques_searches(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["techniques", "--search", "PREFIX TUNING"])
    out = capsys.readouterr().out
    assert "Lester et al." in out and GROUPS["adapters"] in out and GROUPS["growth"] not in out


def test_techniques_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["techniques", "--group", "growth"])
    out = capsys.readouterr().out
    assert "ProgressiveStacking" in out and "RandomLTD" not in out and GROUPS["growth"] in out


def test_techniques_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["techniques", "--json", "--search", "stochastic depth"])
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    one = found["stochastic depth"]
    assert one["by"] == ["StochasticDepth"] and one["tests"] == "tests/model/growth/test_stochastic_depth.py"
    assert one["status"] == "built" and "1603.09382" in one["paper"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--search", "perpetuum"], "--search perpetuum: no entry has this word. Search for part of"),
        (["--group", "grwth"], "Did you mean 'growth'"),
        (["--all"], "got --all; there is no such option"),
    ],
)
def test_what_finds_nothing_is_told(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["techniques", *args])
    assert says in " ".join(capsys.readouterr().err.split())
