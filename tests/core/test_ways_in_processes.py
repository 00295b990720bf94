"""Chosen samples divided over ranks, and changed architectures under strategies that divide parameters: one start of two."""

from typing import Any

import pytest

from tests import processes
from tests.conftest import Once


@pytest.fixture(scope="module")
def found(once: Once) -> dict[str, Any]:
    return once("ways_in", lambda: processes.launch("tests.core.way_in_jobs", timeout=900))


@pytest.mark.timeout(960)
def test_chosen_samples_are_divided_over_the_ranks(found: dict[str, Any]) -> None:
    """Each rank has as many batches as the other, together they have the chosen samples, and resumes are exact."""
    n = found["N"]
    for name, ranks in found["samples"].items():
        bars = ranks[0]["bars"]
        assert [rank["bars"] for rank in ranks] == [bars, bars], name
        assert all(all(rank["again"]) for rank in ranks), name
        orders = [rank["orders"] for rank in ranks]
        assert orders[0] == orders[1], name
        done = 0
        for number, count in enumerate(bars[:-1]):  # the last epoch is not gone through
            mine = [[i for batch in rank["seen"][done : done + count] for i in batch] for rank in ranks]
            done += count
            both = mine[0] + mine[1]
            assert len(both) - len(set(both)) <= 1, f"{name}: more than what evens the ranks out came twice"
            if orders[0]:
                expected = [i for i in orders[0][number] if i in set(both)]
                seen = [i for pair in zip(*mine, strict=True) for i in pair]
                assert seen[: len(expected)] == expected, f"{name}: not in the order of the plain run"
                assert sorted(orders[0][number]) == list(range(n)) or "drop_last" in name


@pytest.mark.timeout(960)
@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_changed_architectures_under_hybrid_parallel(layout: str, found: dict[str, Any]) -> None:
    """The change comes before the division; the checkpoint loads into ``apply(plain)``, and both fold into one module."""
    for rank in found["sharded"][layout]:
        assert rank.get("refused") is None
        assert rank["apart"] < 1e-5 and rank["moved"] > 0.01 and rank["ups"] > 0


@pytest.mark.timeout(960)
def test_what_is_divided_already_is_refused(found: dict[str, Any]) -> None:
    first, scale, norm = found["divided"]
    assert "has sharded parameters (DTensor)" in first
    assert "Call lightning_eff.apply(part, technique) in configure_model before it shards them" in first
    assert scale.startswith("LayerScale: FSDPTinyGPT is already sharded (DTensor), but the new parameter blocks.0."), (
        scale
    )
    assert "Call lightning_eff.apply(self, LayerScale(...)) in configure_model before" in scale
    assert norm.startswith("QKNorm: ") and "(DTensor)" in norm and "Call lightning_eff.apply(" in norm


@pytest.mark.timeout(960)
def test_scales_of_branches_have_their_gradients_where_parameters_are_divided(found: dict[str, Any]) -> None:
    assert found["scaled"]["apart"] < 1e-6 and found["scaled"]["scales"] > 0
