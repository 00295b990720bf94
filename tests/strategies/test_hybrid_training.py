"""Training in every layout equals the single process: losses, weights, with accumulation, clipping and precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import largest
from tests.strategies.hybrid_jobs import Settings, apart, run_case
from tests.strategies.launch import launch
from tests.strategies.pipeline_models import SLOW

JOBS = "tests.strategies.hybrid_jobs"
ACCUMULATE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}

TWO: dict[str, Settings] = {
    "data": {"model": "tiny_gpt", "strategy": "hybrid"},
    "data, clipped": {"model": "gpt2", "strategy": {}, "fit": ACCUMULATE, "steps": 10},
    "data, by value": {"model": "gpt2", "strategy": {}, "fit": BY_VALUE, "steps": 10},
    "replicas": {"model": "tiny_gpt", "strategy": {"shard": False}},
    "tensor, clipped": {"model": "gpt2", "strategy": {"tensor_parallel_size": 2}, "fit": ACCUMULATE, "steps": 10},
    "tensor, sequence": {
        "model": "llama",
        "strategy": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "fit": ACCUMULATE,
        "steps": 10,
    },
    "pipeline, one name": {"model": "tiny_gpt", "strategy": "hybrid_pp2"},
    "pipeline, clipped": {"model": "gpt2", "strategy": {"pipeline_parallel_size": 2}, "fit": ACCUMULATE, "steps": 10},
    "pipeline, padded": {
        "model": "gpt2",
        "padded": True,
        "strategy": {"pipeline_parallel_size": 2},
        "fit": ACCUMULATE,
        "steps": 10,
    },
    "pipeline, masked": {
        "model": "bert",
        "padded": True,
        "strategy": {"pipeline_parallel_size": 2, "schedule": "DualPipeV"},
        "steps": 10,
    },
    "pipeline, by value": {"model": "gpt2", "strategy": {"pipeline_parallel_size": 2}, "fit": BY_VALUE, "steps": 10},
}

FOUR: dict[str, Settings] = {
    "copies of shards": {"model": "tiny_gpt", "strategy": "hybrid_shard2", "steps": 6},
    "copies of shards, clipped": {"model": "gpt2", "strategy": {"shard": 2}, "fit": ACCUMULATE, "steps": 10},
    "data x pipeline": {"model": "gpt2", "strategy": {"pipeline_parallel_size": 2}},
    "data x pipeline, clipped": {
        "model": "tiny_gpt",
        "strategy": {"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"},
        "fit": ACCUMULATE,
        "steps": 10,
    },
    "replicas x pipeline": {
        "model": "bert",
        "strategy": {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B", "shard": False},
        "fit": ACCUMULATE,
        "steps": 10,
    },
    "pipeline": {"model": "vit", "strategy": "hybrid_pp4"},
    "pipeline, first and last share": {"model": "gpt2", "strategy": "hybrid_pp4", "steps": 4},
    "pipeline, they share again": {"model": "bert", "strategy": "hybrid_pp4", "steps": 4},
    "data x tensor": {"model": "llama", "strategy": {"tensor_parallel_size": 2}, "steps": 10},
    "data x tensor, clipped": {
        "model": "gpt2",
        "strategy": {"tensor_parallel_size": 2, "shard": False},
        "fit": ACCUMULATE,
        "steps": 10,
    },
    "tensor x pipeline": {"model": "llama", "strategy": "hybrid_tp2_pp2", "fit": ACCUMULATE, "steps": 10},
    "sequence x pipeline": {
        "model": "gpt2",
        "strategy": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True},
        "fit": ACCUMULATE,
        "steps": 10,
    },
}

MODELS = ("gpt2", "llama", "bert", "vit", "tiny_gpt")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
GRID: dict[int, dict[str, Settings]] = {
    2: {"pp2": {"pipeline_parallel_size": 2}, "dp2": {}, "tp2": {"tensor_parallel_size": 2}},
    4: {
        "pp4": {"pipeline_parallel_size": 4},
        "dp2_pp2": {"pipeline_parallel_size": 2},
        "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "dp2_tp2": {"tensor_parallel_size": 2},
        "dp2_tp2, sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    },
    8: {
        "dp2_tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "copies_tp2": {"shard": 2, "tensor_parallel_size": 2},
        "copies_pp2": {"shard": 2, "pipeline_parallel_size": 2},
    },
}


def reference(case: Settings, tmp_path: Path, cache: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training in this process alone."""
    settings = {key: case[key] for key in ("model", "steps", "fit", "padded") if key in case}
    key = repr(settings)
    if key not in cache:
        losses = run_case({**settings, "strategy": "auto", "devices": 1, "keep": "alone.pt"}, str(tmp_path))
        cache[key] = losses, torch.load(tmp_path / "alone.pt")
    return cache[key]


def compare(cases: dict[str, Settings], world_size: int, tmp_path: Path) -> None:
    """Run ``cases`` in processes; each must have the losses of the single process within 1e-5."""
    given = {name: {**case, "devices": world_size, "keep": f"{i}.pt"} for i, (name, case) in enumerate(cases.items())}
    found = launch(JOBS, "run_cases", str(tmp_path), given, world_size=world_size)
    cache: dict[str, Any] = {}
    for i, (name, case) in enumerate(cases.items()):
        losses, weights = reference(case, tmp_path, cache)
        assert len(found[name]) == len(losses), name
        worst = largest(abs(a - b) for a, b in zip(found[name], losses, strict=True))
        assert worst < 1e-5, f"{name}: losses are {worst} from the single process's"
        assert losses[-1] < losses[0] - 1e-3, "nothing was learnt, so nothing was compared"
        # AdamW divides by a gradient that is rounding noise where the true one is zero (a key's bias): as the steps allow
        assert apart(torch.load(tmp_path / f"{i}.pt"), weights) < 5e-3, name


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    compare(TWO, 2, tmp_path)


@pytest.mark.slow  # a minute and a half; two processes do so each time
def test_four_processes_train_as_one(tmp_path: Path) -> None:
    compare(FOUR, 4, tmp_path)


@pytest.mark.slow  # the full grid: half an hour on two cores
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("world_size", GRID)
def test_every_model_in_every_layout_trains_as_one(world_size: int, tmp_path: Path) -> None:
    layouts = GRID[world_size]
    cases = {f"{model} {name}": {"model": model, "strategy": s} for model in MODELS for name, s in layouts.items()}
    cases |= {
        f"{model} {name}, clipped": {"model": model, "strategy": s, "fit": ACCUMULATE, "steps": 10}
        for model in MODELS
        for name, s in layouts.items()
    }
    if world_size == 2:
        cases |= {
            name: {"model": "gpt2", "strategy": {"pipeline_parallel_size": 2, "schedule": name}, "fit": ACCUMULATE}
            for name in SCHEDULES
        }
        cases |= {name: {"model": name, "strategy": {"pipeline_parallel_size": 2}} for name in SLOW}
    compare(cases, world_size, tmp_path)
