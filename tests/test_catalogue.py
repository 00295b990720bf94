"""The catalogue: what the surveys name, what does it here, and what the command line says of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.making import cards, facts
from lightning_eff import cli
from lightning_eff._catalogue import catalogue, collecting
from lightning_eff._catalogue.facts import facts as read_facts
from lightning_eff._catalogue.groups import GROUPS
from lightning_eff._core._surveys import items as surveys
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes

ROOT = Path(__file__).parent.parent
ENTRIES = catalogue.entries()
SHOWN = {name for entry in ENTRIES for name in entry.by}


def test_every_technique_stands_in_it_and_once_for_each_row() -> None:
    missing = {cls.__name__ for cls in technique_classes()} - SHOWN
    assert not missing
    assert set(public.HOMES) >= SHOWN
    names = [(entry.group, entry.name) for entry in ENTRIES]
    assert len(set(names)) == len(names)


#: Techniques that neither survey names, and the sections of others, by hand from the surveys themselves.
BESIDE = {
    "LookSAM",
    "Lookahead",
    "RandomLTD",
    "TokenDropping",
    "QuantizedBase",
    "StochasticRoundingBF16",
    "LabelSmoothing",
}
SECTIONS = {
    "Mixup": (None, "3.1"),
    "ImportanceSampling": ("2.2", None),
    "SampleSubset": (None, "3.2"),
    "RHOLoss": (None, "5.3"),
    "TokenMerging": (None, "4.2"),
    "ProgressiveStacking": ("2.1", None),
    "ShallowToDeep": (None, "4.4"),
    "Fixup": ("2.1", None),
    "MetaInit": (None, "4.3"),
    "KFAC": (None, "5.1"),
    "SharpnessAwareMinimization": ("2.1", "5.3"),
    "ExponentialMovingAverage": (None, "5.4"),
    "LoRA": ("3", None),
    "JointSpar": (None, "4.2"),
    "BlockSparsity": (None, "7.2"),
    "DiffAugment": (None, "6"),
    "HybridParallelStrategy": ("3", "7.2, 7.3, 7.4"),
}


@pytest.mark.parametrize("name", sorted(cls.__name__ for cls in technique_classes()))
def test_class_catalogue_and_card_name_the_same_sections(name: str) -> None:
    survey = public.found(name).survey
    entries = [entry for entry in ENTRIES if name in entry.by]
    told = {part for entry in entries if entry.group != "beside" for part in entry.surveys.split("; ")}
    card = cards.card(name)
    assert (survey is None) == (not told) == ("In the [surveys]" not in card)
    if survey is not None:
        parts = {"Zhuang": survey.zhuang, "Shen": survey.shen}
        assert told == {f"{who} {one}" for who, found in parts.items() for one in (found or "").split(", ") if one}
        assert f"In the [surveys](../catalogue.md): {survey}." in card
    assert name not in BESIDE or survey is None
    assert name not in SECTIONS or (survey is not None and (survey.zhuang, survey.shen) == SECTIONS[name])


def test_an_item_has_a_section_and_a_class_or_a_reason() -> None:
    for item in (item for rows in surveys.items().values() for item in rows):
        assert item.zhuang in ("", "2.1", "2.2", "3", "4", "5"), item
        assert re.fullmatch(r"|[3-7](\.[1-5])?", item.shen), item
        assert item.zhuang or item.shen, item
        assert bool(item.by) + bool(item.absent) + bool(item.how and not item.by) == 1, item


def test_groups_stand_in_the_surveys_order() -> None:
    order = [entry.group for entry in ENTRIES]
    assert list(dict.fromkeys(order)) == list(GROUPS)
    assert [entry.name for entry in ENTRIES][:4] == ["flips, crops, jitter", "Cutout", "Random Erasing", "Mixup"]


def test_every_row_says_what_does_it_or_why_nothing_does() -> None:
    for entry in ENTRIES:
        assert (entry.status == catalogue.BUILT) == bool(entry.by)
        assert (entry.status == catalogue.ABSENT) == bool(entry.why)
        assert entry.source or entry.group == "beside", entry
        assert not entry.by or (entry.paper and entry.saves and entry.constraints), entry


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
    shapes = [re.fullmatch(r"shape='(\w+)'", item.how) for item in surveys.items()["budget"]]
    found = [match[1] for match in shapes if match is not None]
    assert len(found) >= 5
    for shape in found:
        public.found("LearningRateSchedule")(shape)


def test_an_item_waits_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {**surveys.items(), "growth": (surveys.Item("mixture of depths", "–", shen="4.4", by=("Unheard",)),)}
    monkeypatch.setattr(collecting, "items", lambda: rows)
    found = {entry.name: entry for entry in collecting.collected()}
    assert found["mixture of depths"].status == catalogue.NOT_YET
    assert found["DropIn"].group == "beside", "no item names it any longer"


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
    cli.main(["techniques", "--json", "--search", "stochasticdepth"])
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    one = found["StochasticDepth"]
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
