"""A plan is run as it is printed, and its ranks take the memory that was predicted; small, on the CPU."""

from typing import Any

import pytest

from benchmarks.plan_memory import experiment

SIZES = {"width": 64, "layers": 4, "length": 64, "batch_size": 2, "precision": "bf16-mixed"}


def check(found: dict[str, Any], least: float, most: float) -> None:
    """What lies still is exact but for the optimizer's step counts and norms that are not divided; the peak is near."""
    for row in found["ranks"]:
        predicted, measured = row["predicted"], row["measured"]
        for name in ("weights", "gradients", "optimizer"):
            assert predicted[name] == pytest.approx(measured[name], rel=0.03), (row, name)
        assert least < predicted["total"] / measured["total"] < most, row


def test_one_process_takes_what_was_predicted() -> None:
    check(experiment(1, ("--only", "remat=selective"), **SIZES), 0.9, 1.3)


@pytest.mark.slow
def test_eight_processes_take_what_was_predicted() -> None:
    """Pipeline 2 x data 2 (sharded) x tensor 2."""
    only = ("pp=2", "tp=2", "shard=zero3", "micro_batch=1", "schedule=1F1B")
    found = experiment(8, [word for each in only for word in ("--only", each)], **SIZES)
    arguments = found["config"]["trainer"]["strategy"]["init_args"]
    assert (arguments["pipeline_parallel_size"], arguments["tensor_parallel_size"], arguments["shard"]) == (2, 2, True)
    check(found, 0.85, 1.3)  # seen: 0.91 on the last stage, where FSDP's flat buffers are a tenth of so small a model
