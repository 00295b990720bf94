"""Rematerialisation under the hybrid strategy: the plain run's losses, or a refusal at setup on every rank."""

from typing import Any

import pytest

from tests.conftest import Once
from tests.strategies.launch import launch
from tests.strategies.rematerialization_jobs import LAYOUTS

pytestmark = pytest.mark.timeout(900)

REFUSED = {
    ("shards", "optimal"): "with sharded parameters or a pipeline does not support",
    ("1F1B", "optimal"): "with sharded parameters or a pipeline does not support",
    ("ZBVZeroBubble", "optimal"): "sharded parameters or a pipeline",
    ("ZBVZeroBubble", "selective"): "splits the backward pass, but torch returns what is stored only once",
}


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    return once(
        "rematerialization", lambda: launch("tests.strategies.rematerialization_jobs", "all_layouts", world_size=2)
    )


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("policy", ["full", "sqrt", "selective", "optimal"])
def test_policies_train_as_without_or_are_refused(layout: str, policy: str, two: dict[str, Any]) -> None:
    found = two[f"{layout} {policy}"]
    if (layout, policy) in REFUSED:
        assert REFUSED[layout, policy] in found
        assert "Use policy='full'" in found
    else:
        assert found == pytest.approx(two[f"{layout} None"], abs=1e-6)
        assert len(found) == 3
