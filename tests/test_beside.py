"""Cases beside tests are found by their text, each once."""

from pathlib import Path

import pytest
import torch

from tests.beside import SideOutputs, beside
from tests.cases import ALL, CASES, STAND_INS

CASE = "tests.cases.Case"


def files(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / "tests" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"from tests.cases import Case\n\n{text}\n")
    return folder / "tests"


def test_names_are_read_without_importing(tmp_path: Path) -> None:
    tests = files(
        tmp_path,
        test_a="CASES = {'B': Case(1), 'A': Case(2)}",
        test_b="OTHERS = {'C': Case(3)}",
        test_c="CASES = {'E': Case(5)}",
        helpers="CASES = {'D': Case(4)}",
    )
    elsewhere = tests / "test_c.py"
    elsewhere.write_text(elsewhere.read_text().replace("from tests.cases import Case", "class Case: ..."))
    assert beside("CASES", CASE, tests) == {"A": "tests.test_a", "B": "tests.test_a"}
    assert beside("OTHERS", CASE, tests) == {"C": "tests.test_b"}


def test_a_name_with_two_cases_is_an_error(tmp_path: Path) -> None:
    tests = files(tmp_path, test_a="CASES = {'A': Case()}", test_b="CASES = {'A': Case()}")
    with pytest.raises(ValueError, match=r"CASES: A stands in tests\.test_a and in tests\.test_b; expected it in one"):
        beside("CASES", CASE, tests)


def test_a_name_that_is_computed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tests\.test_a: a key of CASES is 'A' \+ 'B'; expected a literal name"):
        beside("CASES", CASE, files(tmp_path, test_a="CASES = {'A' + 'B': Case()}"))


def test_an_import_moves_no_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run to ask for a case would else have other dropout than a second one."""
    (tmp_path / "draws_at_import.py").write_text("import torch\nCASES = {'A': torch.rand(3)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.get_rng_state()
    assert SideOutputs({"A": "draws_at_import"}, "CASES")["A"].shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_exported_stands_in_for_nothing() -> None:
    assert {*CASES, *STAND_INS} == set(ALL) and CASES and STAND_INS and not set(CASES) & set(STAND_INS)
    with pytest.raises(KeyError, match="Unheard"):
        CASES["Unheard"]
