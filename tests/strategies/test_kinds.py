"""Unusual modules in each layout: each trains as in one process, or is refused at setup with a reason."""

from typing import Any

import pytest

from tests.conftest import Once
from tests.strategies.kinds import KINDS
from tests.strategies.kinds_jobs import LAYOUTS, TECHNIQUES
from tests.strategies.launch import launch

JOBS = "tests.strategies.kinds_jobs"
TOLERANCE = (
    5e-6  # of numbers of up to about 10, after three steps; what a layout leaves out or counts twice is 1e-3 and more.
    # Bilinear blocks in a pipeline come nearest to it, by rounding alone: in float64 they are within 2e-15.
)

pytestmark = pytest.mark.timeout(1800)  # the first test of a layout trains all modules in it


@pytest.fixture(scope="module")
def found(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By layout and module, how far it is from one process; one start of two processes for each layout."""

    def run() -> dict[str, Any]:
        folder = str(tmp_path_factory.mktemp("kinds"))
        launch(JOBS, "alone", folder, list(KINDS), world_size=1)
        return {layout: launch(JOBS, "divided", folder, layout, list(KINDS), world_size=2) for layout in LAYOUTS}

    return once("kinds", run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_a_module_trains_as_in_one_process_or_is_refused(
    found: dict[str, dict[str, Any]], name: str, layout: str
) -> None:
    kind, result = KINDS[name], found[layout][name]
    if layout in kind.refused:
        of_torch = kind.refused[layout] == "find_unused_parameters"
        assert kind.refused[layout] in result.get("crashed" if of_torch else "refused", "it was not refused"), result
        return
    assert "crashed" not in result, result
    assert "refused" not in result, result
    if layout not in kind.apart:
        assert {what: far for what, far in result.items() if not far <= TOLERANCE} == {}


def test_a_module_that_trains_apart_is_told_of_by_design() -> None:
    assert [name for name, kind in KINDS.items() if {*kind.apart} - {"ddp"}] == ["BatchNorm"]
    assert [name for name, kind in KINDS.items() if kind.apart == ("ddp",)] == ["Thawed", "MaxNorm"]


@pytest.fixture(scope="module")
def communicated(once: Once) -> dict[str, dict[str, Any]]:
    """By technique, what it makes of parameters of all kinds under DDP."""
    return once("kinds_communication", lambda: launch(JOBS, "communication", world_size=2))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_parameters_of_all_kinds_are_sent(communicated: dict[str, dict[str, Any]], name: str) -> None:
    result = communicated[name]
    assert "crashed" not in result, result
    assert result["still"] == [], "all parameters, and both parts of complex ones, have moved"
    assert result["apart"] < (TOLERANCE if TECHNIQUES[name][1] else 0.1)
