"""What a module reaches through the hybrid strategy is what one process gives it, on every rank."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.conftest import Once
from tests.strategies.launch import launch
from tests.strategies.reach_jobs import observe

JOBS = "tests.strategies.reach_jobs"
ONE = {"pipeline_parallel_size": 2, "schedule": "GPipe", "num_microbatches": 1}
PIPELINE, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "collecting, whole batches": ("Collecting", ONE),
    "collecting, pipeline": ("Collecting", PIPELINE),
    "collecting, two stages a rank": ("Collecting", {**PIPELINE, "schedule": "ZBVZeroBubble"}),
    "collecting, tensor": ("Collecting", TENSOR),
    "collecting, shard": ("Collecting", {}),
    "recurrent": ("Recurrent", ONE),
    "looking": ("Looking", PIPELINE),
    "contrastive, tensor": ("Contrastive", TENSOR),
    "contrastive, shard": ("Contrastive", {}),
    "with gradients": ("WithGradients", PIPELINE),
    "waiting": ("Waiting", PIPELINE),
}


@pytest.fixture(scope="module")
def seen(once: Once) -> dict[str, list[Any]]:
    """What each of two ranks saw in each case."""
    return once("hybrid_reach", lambda: launch(JOBS, "observe_all", CASES, world_size=2))


@pytest.fixture(scope="module")
def alone(once: Once) -> dict[str, Any]:
    """What one process sees."""
    names = ("Collecting", "Recurrent", "Looking", "Contrastive")
    return once("hybrid_reach_alone", lambda: {name: observe(name, "auto") for name in names})


@pytest.mark.parametrize(
    "name", [name for name, (module, _) in CASES.items() if module not in ("WithGradients", "Waiting")]
)
def test_every_rank_sees_what_one_process_does(seen: Any, alone: Any, name: str) -> None:
    module, settings = CASES[name]
    expected = alone[module]
    in_parts = settings.get("pipeline_parallel_size") == 2 and settings.get("num_microbatches") != 1
    for rank in seen[name]:
        assert "error" not in rank, rank
        logged, wanted = dict(rank["logged"]), dict(expected["logged"])
        if in_parts and "train_last" in logged:  # the attribute is the last micro-batch's
            assert 0 < logged.pop("train_last") < wanted.pop("train_last")
        assert logged == pytest.approx(wanted, abs=2e-5)
        for key, values in rank["weights"].items():
            assert values == pytest.approx(expected["weights"][key], abs=2e-5), key
        if module not in ("Collecting", "Recurrent"):
            continue
        assert rank["tested"] == pytest.approx(expected["tested"], abs=2e-5)
        if settings:
            assert rank["outputs"] == expected["outputs"] and rank["noted"] == expected["noted"]
            assert [batch for batch, _ in rank["predicted"]] == [batch for batch, _ in expected["predicted"]]
            for (_, mine), (_, theirs) in zip(rank["predicted"], expected["predicted"], strict=True):
                assert float((torch.tensor(mine) - torch.tensor(theirs)).abs().max()) <= 2e-5
    if not settings and module == "Collecting":  # data-parallel ranks share the samples
        both = [sum(values) for values in zip(*(rank["outputs"] for rank in seen[name]), strict=True)]
        assert both == expected["outputs"]


def test_gradients_in_evaluation_are_refused(seen: Any) -> None:
    for rank in seen["with gradients"]:
        assert "called with gradients enabled in an evaluation step" in rank["error"]
        assert "pipeline_parallel_size=1" in rank["error"]


def test_waiting_for_all_processes_in_a_training_step_is_refused(seen: Any) -> None:
    for rank in seen["waiting"]:
        assert "training_step calls the strategy's barrier" in rank["error"] and "on_train_batch_end" in rank["error"]


def test_every_public_method_of_strategies_has_a_decision() -> None:
    """The table in the docs names each, and those that it says are overridden are."""
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text().partition("## What a module reaches")[2]
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w[^|]*?) \|", page, re.MULTILINE)
    rows = {name: whose for names, whose in table for name in re.findall(r"\w+", names)}
    public = {name for name in dir(ModelParallelStrategy) if not name.startswith("_")}
    public |= set(vars(ModelParallelStrategy())) - {
        name for name in vars(ModelParallelStrategy()) if name.startswith("_")
    }
    assert public <= rows.keys(), f"without a decision: {sorted(public - rows.keys())}"
    ours = {name for name in public if any(name in vars(c) for c in _own_classes())}
    assert {name for name, whose in rows.items() if whose != "Lightning's"} >= ours, (
        "overridden, but the table says not"
    )
    inherited = {name for name, whose in rows.items() if whose == "Lightning's"}
    assert not inherited & ours
    assert rows.keys() - public == set(), "no such method"


def _own_classes() -> list[type]:
    return [c for c in inspect.getmro(HybridParallelStrategy) if c.__module__.startswith("lightning_eff.strategies")]
