"""Forward passes that change weights or buffers in place: refused where the change goes wrong, whatever technique works."""

from typing import Any

import pytest

from tests.conftest import Once
from tests.strategies.launch import launch

JOBS = "tests.strategies.in_place_jobs"
COPIES, SHARDS = {"shard": False}, {"min_num_params": 1}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {
    "pipeline_parallel_size": 2,
    "schedule": "GPipe",
    "num_microbatches": 1,
}  # others refuse it before it is cut

# name -> module, technique, strategy
REFUSED: dict[str, tuple[str, str | None, Any]] = {
    "copies": ("MaxNorm", None, COPIES),
    "copies, batch technique": ("MaxNorm", "batch", COPIES),
    "copies, SAM": ("MaxNorm", "sam", COPIES),
    "compressed, SAM": ("MaxNorm", "sam", "compressed"),
    "shards": ("MaxNorm", None, SHARDS),
    "shards, batch technique": ("MaxNorm", "batch", SHARDS),
    "shards, noise scale": ("MaxNorm", "noise", SHARDS),
    "blocks in shards": ("Clamped", None, SHARDS),
    "blocks in shards, noise scale": ("Clamped", "noise", SHARDS),
    "tensor": ("MaxNorm", None, TENSOR),
    "tensor, batch technique": ("MaxNorm", "batch", TENSOR),
    "behind a pipeline's blocks": ("ClampedHead", None, PIPELINE),
    "behind a pipeline's blocks, batch technique": ("ClampedHead", "batch", PIPELINE),
}
ACCEPTED: dict[str, tuple[str, str | None, Any]] = {
    "the same on every rank": ("Clamped", None, COPIES),
    "the same on every rank, SAM": ("Clamped", "sam", COPIES),
    "nothing changed but by SAM": ("Mlp", "sam", COPIES),
    "nothing changed but by SAM, compressed": ("Mlp", "sam", "compressed"),
    "nothing changed, noise scale in shards": ("Mlp", "noise", SHARDS),
    "buffers within split layers": ("Observed", None, TENSOR),
}
WORDS = {"blocks": "'blocks.0.weight'", "behind": "'table'"}


@pytest.fixture(scope="module")
def found(once: Once) -> dict[str, list[dict[str, Any]]]:
    return once("in_place", lambda: launch(JOBS, "outcomes", {**REFUSED, **ACCEPTED}, world_size=2))


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_in_place_that_goes_wrong_is_refused_on_all_ranks(
    found: dict[str, list[dict[str, Any]]], name: str
) -> None:
    where = WORDS.get(name.split()[0], "'embed.weight'")
    for rank in found[name]:
        assert f"{where} in place" in rank["refused"] or f"{where}, " in rank["refused"], rank
        assert "on_train_batch_end" in rank["refused"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_goes_right_is_accepted(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [rank["refused"] for rank in found[name]] == ["", ""]
    assert found[name][0]["ranks"] == 0.0
    name_of, apart = found[name][0]["apart"]
    assert apart < 1e-5, name_of
