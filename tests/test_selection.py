"""``make test K=name``: whose tests those are, and what is said of a name that nothing has."""

import re
from pathlib import Path

import pytest

from benchmarks.suite_growth import Timed, grown, kind, read
from tests import full
from tests.cases import ALL
from tests.plugins import PLUGINS
from tests.selection import modules, named


@pytest.mark.parametrize(
    "asked", ["SharpnessAwareMinimization", "sharpness_aware_minimization", "sharpness-aware minimization"]
)
def test_a_name_may_be_written_as_class_or_file(asked: str) -> None:
    assert named(asked, modules()) == "SharpnessAwareMinimization"


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(pytest.UsageError, match=r"'SharpnesAware'.*nearest are SharpnessAwareMinimization"):
        named("SharpnesAware", modules())
    with pytest.raises(pytest.UsageError, match="expected one of LocalSGD, Muon"):
        named("qqqq", ["Muon", "LocalSGD"])


def test_own_tests_stand_in_a_file_of_the_modules_name() -> None:
    files = {path.stem for path in Path(__file__).parent.rglob("test_*.py")}
    found = modules()
    assert found["RandomSubset"] == "random_subset" and found["FP8Precision"] == "fp8"
    cases = {*ALL, *PLUGINS}
    assert {f"test_{found[name]}" for name in cases} <= files


def test_reports_are_counted_by_kind_and_grown(tmp_path: Path) -> None:
    cases = [
        ("tests.test_contract", "test_leaves_no_trace[None-Muon]", 2.0),
        ("tests.test_contract", "test_groups_under_ddp[A-and-3]", 3.0),
        ("tests.test_contract", "test_every_export_has_a_case", 1.0),
        ("tests.test_pairs", "test_stack_trains_and_resumes[00]", 5.0),
        ("tests.test_plugins", "test_under_ddp[INT8Precision]", 7.0),
        ("tests.optim.optimizers.test_muon", "test_step", 11.0),
        ("tests.core.test_steps", "test_stages", 13.0),
    ]
    text = "".join(
        f'<testcase classname="{file}" name="{name}" time="99"><properties><property name="processor_seconds"'
        f' value="{seconds}"/></properties></testcase>'
        for file, name, seconds in cases
    )
    skipped = '<testcase classname="tests.test_gpu" name="test_it" time="99"><skipped/></testcase>'
    clock = '<testcase classname="tests.test_cli" name="test_it" time="0.5"/>'
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{text}{skipped}{clock}</testsuite></testsuites>")
    seconds: dict[str, float] = {}
    for test in read(report):
        assert isinstance(test, Timed)
        seconds[kind(test, {"muon"})] = seconds.get(kind(test, {"muon"}), 0) + test.seconds
    assert seconds == {
        "contract, each technique alone": 2.0,
        "contract, shared by groups": 3.0,
        "fixed": 14.5,
        "pairs": 5.0,
        "contract of plugins": 7.0,
        "own tests": 11.0,
    }
    then = grown(seconds, {"techniques": 9, "plugins": 5, "own": 20}, 100, stacks_now=1e9)
    assert then["fixed"] == 14.5 and then["contract, each technique alone"] == pytest.approx(2 * 90 / 9)
    assert then["contract of plugins"] == 14.0 and then["own tests"] == 55.0 and 0 < then["pairs"] < 5


def test_what_takes_longest_is_left_to_the_full_suite() -> None:
    seconds = {"a.py::quick": 1.0, "a.py::mean[x]": 1.0, "a.py::mean[y]": 5.0, "b.py::long": 9.0}
    seconds |= {full.STAYS[1]: 20.0, **{f"{full.PAIRS}[{i}]": 4.0 for i in range(5)}}
    seconds |= {f"d.py::test_ranks_train{full.RULE}": 0.5}
    assert full.longest(seconds, budget=40.0) == ["b.py::long"], "all but two stacks are left out as it is"
    assert full.longest(seconds, budget=30.0) == ["a.py::mean", "b.py::long"]
    assert full.longest(seconds, budget=0.0) == ["a.py::mean", "a.py::quick", "b.py::long"], (
        "what stays is never left out"
    )


def test_a_report_is_read_without_what_its_own_file_leaves_out(tmp_path: Path) -> None:
    def case(name: str, properties: dict[str, object]) -> str:
        some = "".join(f'<property name="{key}" value="{value}"/>' for key, value in properties.items())
        return f'<testcase classname="tests.a" name="{name}" time="9"><properties>{some}</properties></testcase>'

    cases = case("test_b[x]", {"processor_seconds": 2.5}), case("test_b[y]", {full.APART: True}), case("test_c", {})
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert full.read(tmp_path / "report.xml") == {"tests/a.py::test_b[x]": 2.5, "tests/a.py::test_c": 9.0}


def test_every_test_that_is_left_out_exists() -> None:
    for name in full.listed():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / file).read_text(), f"{name}: run python -m tests.full"


def test_every_technique_keeps_tests_of_its_own() -> None:
    """Of the file that is called after it, ``make test`` runs a test, as of the contract."""
    root, found = Path(__file__).parent, modules()
    of = {path.stem: path for path in root.rglob("test_*.py")}
    for name in {*ALL, *PLUGINS}:
        path = of[f"test_{found[name]}"]
        functions = re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
        assert {f"tests/{path.relative_to(root)}::{one}" for one in functions} - full.listed(), name
    assert full.listed().isdisjoint(full.STAYS)
