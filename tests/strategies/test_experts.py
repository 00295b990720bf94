"""Mixtures of experts in every layout: losses, with those of routers, and weights equal a loop in float64."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Once
from tests.strategies.hybrid_jobs import Settings
from tests.strategies.launch import launch, start

JOBS = "tests.strategies.experts_jobs"
KINDS = ("list", "pair", "attribute", "mixtral", "list of logits", "pair of logits")
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
CONTEXT = {"context_parallel_size": 2}

LAYOUTS: dict[str, Settings] = {
    "ddp": {"strategy": "ddp", "parts": "replicas"},
    "shards": {"strategy": {}, "parts": "replicas"},
    "shards, recomputed": {"strategy": {}, "parts": "replicas", "remat": True},
    "tensor": {"strategy": {"tensor_parallel_size": 2}, "parts": "whole"},
    "pipeline": {"strategy": PIPELINE, "parts": "micro-batches"},
    "pipeline, recomputed": {"strategy": PIPELINE, "parts": "micro-batches", "remat": True},
    "context": {"strategy": CONTEXT, "parts": "whole"},
}
FOUR: dict[str, Settings] = {
    "data x pipeline": {
        "strategy": {"pipeline_parallel_size": 2, "num_microbatches": 2},
        "parts": "micro-batches of replicas",
    },
    "tensor x pipeline": {"strategy": {**PIPELINE, "tensor_parallel_size": 2}, "parts": "micro-batches"},
    "data x context": {"strategy": CONTEXT, "parts": "replicas"},
}
TWO = {
    f"{kind}, {name}": {**layout, "kind": kind}
    for kind in KINDS
    for name, layout in LAYOUTS.items()
    if kind in ("list", "mixtral") or name in ("pipeline", "context")
}
#: SparseUpcycling, whose experts choose in encoders, and are chosen in decoders.
UPCYCLED = {
    f"upcycled {model}, {name}": {**layout, "kind": f"upcycled {model}"}
    for model in ("bert", "llama", "vit")
    for name, layout in LAYOUTS.items()
    if name in ("ddp", "shards", "shards, recomputed", "tensor")
}
TWO |= UPCYCLED
WIDE = {
    f"{kind}, {name}": {**layout, "kind": kind}
    for kind in ("pair of logits", "mixtral")
    for name, layout in FOUR.items()
}
#: Balance losses of a rank's tokens are no part of that of all tokens: a product of means.
REFUSED = [
    name for name in (*TWO, *WIDE) if name.endswith("context") and "logits" not in name and "mixtral" not in name
]


@pytest.fixture(scope="module")
def two(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes find, one start for all."""
    directory = str(tmp_path_factory.mktemp("experts"))
    resumed = {kind: TWO[f"{kind}, pipeline"] for kind in ("list", "mixtral")}
    return once("experts_two", lambda: launch(JOBS, "everything", directory, TWO, resumed, world_size=2))


@pytest.fixture(scope="module")
def four(once: Once) -> dict[str, Any]:
    return once("experts_four", lambda: launch(JOBS, "everything", "", WIDE, {}, world_size=4))


def check(name: str, ranks: list[Any]) -> None:
    for found in ranks:
        if name in REFUSED:
            words = "without values for each token" if name.startswith("pair") else "from the tokens of one rank"
            assert found.startswith("HybridParallelStrategy(context_parallel_size=2): ") and words in found
            continue
        assert not isinstance(found, str), found
        assert found["loss"] <= 1e-12 and found["weights"] <= 1e-14, found
        assert found["learnt"] > 1e-3, "nothing was learnt, so nothing was compared"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_a_loop(name: str, two: dict[str, Any]) -> None:
    check(name, two[name])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WIDE)
def test_four_processes_train_as_a_loop(name: str, four: dict[str, Any]) -> None:
    check(name, four[name])


def test_shards_go_on_with_the_optimizer_states_of_a_dense_run(tmp_path: Path) -> None:
    found = launch(JOBS, "states", str(tmp_path), world_size=2)
    assert found["shards"] == pytest.approx([0, 0], abs=1e-14)
    assert min(found["without"]) > 1e-5, "the states changed nothing, so nothing was compared"


@pytest.mark.parametrize("kind", ["list", "mixtral"])
def test_a_pipeline_resumes_bit_for_bit(kind: str, two: dict[str, Any]) -> None:
    assert two[f"{kind}, resumed"] == [[True, True], [True, True]]


def test_what_blocks_leave_only_later_is_refused() -> None:
    """Nothing of it was there when places were found, so other ranks would not get it."""
    for found in launch(JOBS, "late", CONTEXT, world_size=2):
        assert "leave a tensor with a gradient in blocks.0.balance, but left none there" in found["attribute"]
        assert "leave a tensor with a gradient in router_losses, but left none there" in found["list"]
        assert "returned further tensors without values for each token" in found["pair of logits"]


@pytest.mark.parametrize(
    ("kind", "place"), [("attribute", "blocks.0.balance"), ("list", "router_losses"), ("pair", "output 1 of a block")]
)
def test_what_blocks_of_a_stage_leave_only_later_ends_the_run(kind: str, place: str) -> None:
    codes, logs, _ = start(JOBS, "late_in_a_stage", kind, world_size=2, timeout=300)
    assert 0 not in codes and f"leave a tensor with a gradient in {place}, but left none there" in logs[0]
