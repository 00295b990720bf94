"""Runs under the hybrid strategy resume bit for bit in their layout, and within rounding in another one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import case_of
from tests.runs import SaveBatches
from tests.strategies.hybrid_jobs import Settings
from tests.strategies.launch import launch
from tests.strategies.resume_jobs import BATCHES, losses_of

JOBS = "tests.strategies.resume_jobs"
TP2: Settings = {"tensor_parallel_size": 2}
PP2: Settings = {"pipeline_parallel_size": 2, "num_microbatches": 4}
FOLDER: Settings = {"save_distributed_checkpoint": True}
PLAIN: Settings = {"dropout": 0.0}  # a pipeline draws by micro-batch and block, and others in the order of execution

# of two processes, all with dropout, shuffled data, windows, clipping and validation
LAYOUTS: dict[str, dict[str, Settings]] = {
    "shard": {
        "file": {"strategy": {}, "replicas": 2},
        "folder": {"strategy": FOLDER, "replicas": 2, "batches": [4, 5, 8, 12]},
        "bf16": {"strategy": {}, "replicas": 2, "batches": [2, 7], "fit": {"precision": "bf16-mixed"}},
    },
    "copies": {
        "file": {"strategy": {"shard": False}, "replicas": 2},
        "normed": {"strategy": {"shard": False}, "replicas": 2, "name": "normed", "batches": [4, 8]},
        "normed, sharded": {"strategy": {}, "replicas": 2, "name": "normed", "batches": [4, 8]},
    },
    "fsdp2": {  # Lightning's own loads nothing that was saved before the first step of an optimizer
        "file": {
            "strategy": {"itself": {"save_distributed_checkpoint": False}},
            "replicas": 2,
            "batches": [4, 5, 8, 12],
        },
        "folder": {"strategy": {"itself": {}}, "replicas": 2, "batches": [4, 5, 8, 12]},
        "bf16": {"strategy": {"itself": {}}, "replicas": 2, "batches": [5, 8], "fit": {"precision": "bf16-mixed"}},
    },
    "tp2": {
        "file": {"strategy": TP2},
        "bf16": {"strategy": {**TP2, **FOLDER}, "batches": [4, 9], "fit": {"precision": "bf16-mixed"}},
    },
    "pp2": {
        "file": {"strategy": PP2},
        "bf16": {"strategy": {**PP2, **FOLDER}, "batches": [4, 9], "fit": {"precision": "bf16-mixed"}},
    },
}
OF_FOUR: dict[str, Settings] = {
    "pp2_dp2": {"strategy": {"pipeline_parallel_size": 2}, "replicas": 2, "seeds": True, "batches": [4, 5, 8]},
    "tp2_dp2": {"strategy": TP2, "replicas": 2, "batches": [4, 5, 8]},
    "interleaved": {
        "strategy": {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"},
        "replicas": 2,
        "batches": [4, 7],
    },
    "pp2_dp2, copies": {"strategy": {"pipeline_parallel_size": 2, "shard": False}, "replicas": 2, "batches": [4]},
}
#: Techniques that keep something of past steps, or draw, in a pipeline: each resumes in mid-epoch, within a window.
IN_PIPELINE: dict[str, Settings] = {
    name: {
        "strategy": {"pipeline_parallel_size": 2, "num_microbatches": 2},
        "technique": name,
        "name": case_of(name).model,
        "saved": [4],
        "batches": [4],
    }
    for name in (
        "DataPruning",
        "ImportanceSampling",
        "Mixup",
        "SequencePacking",
        "StochasticDepth",
    )
}
#: Its figures compare the gradients of two steps, of which a checkpoint may stand between.
NOISE: dict[str, Settings] = {
    f"GradientNoiseScale, {layout}": {
        **case,
        "technique": "GradientNoiseScale",
        "fit": {"accumulate_grad_batches": 1, "max_steps": 9},
        "saved": [3, 6],
        "batches": [3, 6],
    }
    for layout, case in {
        "pp2": {"strategy": IN_PIPELINE["Mixup"]["strategy"]},
        "tp2": {"strategy": TP2},
        "shard": {"strategy": {}, "replicas": 2},
    }.items()
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_from_every_batch(layout: str, tmp_path: Path) -> None:
    found = launch(JOBS, "resume_from_every_batch", str(tmp_path), LAYOUTS[layout], world_size=2)
    assert found == {name: [{}, {}] for name in LAYOUTS[layout]}
    if layout == "pp2":
        draws = torch.load(tmp_path / "file" / "batch=5.ckpt", weights_only=True)["lightning_eff_hybrid"]
        assert draws["passes"] == 5 and draws["most"] == 4 and draws["seeds"] == [draws["seed"]]


@pytest.mark.timeout(900)
def test_techniques_resume_in_divided_runs(tmp_path: Path) -> None:
    cases = {**IN_PIPELINE, **NOISE}
    found = launch(JOBS, "resume_from_every_batch", str(tmp_path), cases, world_size=2)
    for ranks in found.values():
        for rank in ranks:
            for batch, names in rank.items():
                rank[batch] = [name for name in names if not name.endswith("milliseconds")]  # by the clock
    assert {name: [any(rank.values()) for rank in ranks] for name, ranks in found.items()} == {
        name: [False, False] for name in cases
    }
    for name in NOISE:
        saved = torch.load(tmp_path / name / "batch=6.ckpt", weights_only=True)["callbacks"]
        assert next(state for key, state in saved.items() if "NoiseScale" in key)["steps"] > 0, "nothing was measured"


@pytest.mark.timeout(900)
def test_a_run_of_two_kinds_of_parallelism_resumes(tmp_path: Path) -> None:
    found = launch(JOBS, "resume_from_every_batch", str(tmp_path), OF_FOUR, world_size=4)
    assert found == {name: [{}] * 4 for name in OF_FOUR}


@pytest.mark.timeout(900)
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """In mid-epoch and within a window: with the same batches, to the same losses, also in a plain process and from one."""
    layouts: dict[str, Any] = {
        "alone": {"strategy": "auto", "module": PLAIN},
        "tp2": {"strategy": TP2, "module": PLAIN},
        "pp2": {"strategy": PP2, "module": PLAIN},
        "ddp": {"strategy": "ddp", "module": PLAIN, "replicas": 2},
        "shard": {"strategy": {}, "module": PLAIN, "replicas": 2},
    }
    pairs = [("alone", "tp2"), ("alone", "pp2"), ("tp2", "pp2"), ("pp2", "tp2"), ("ddp", "shard"), ("shard", "ddp")]
    batches = [4, 8]
    whole = losses_of(layouts["alone"], SaveBatches(tmp_path / "alone", batches))
    assert len(whole) == BATCHES
    found = launch(JOBS, "in_another_layout", str(tmp_path), layouts, pairs, batches, world_size=2)
    assert found["tp2"] == pytest.approx(whole, abs=1e-5) == found["pp2"]
    assert found["ddp"] == pytest.approx(found["shard"], abs=1e-5)
    for saved, name in pairs:
        for batch in batches:
            expected = (whole if layouts[saved].get("replicas", 1) == 1 else found["ddp"])[batch:]
            got = found[f"{saved} in {name} after {batch}"]
            assert got == pytest.approx(expected, abs=1e-5), (saved, name, batch)
    for saved in ("tp2", "pp2"):
        for batch in batches:
            got = losses_of(layouts["alone"], resume=tmp_path / saved / f"batch={batch}.ckpt")
            assert got == pytest.approx(whole[batch:], abs=1e-5), (saved, batch)


@pytest.mark.timeout(900)
def test_a_checkpoint_may_be_saved_after_the_fit(tmp_path: Path) -> None:
    cases: dict[str, Settings] = {
        "shard": {"strategy": {}, "replicas": 2},
        "shard, folder": {"strategy": FOLDER, "replicas": 2},
        "tp2": {"strategy": TP2},
        "pp2": {"strategy": PP2},
        "pp2, folder": {"strategy": {**PP2, **FOLDER}},
    }
    found = launch(JOBS, "save_after_the_fit", str(tmp_path), cases, world_size=2)
    assert {name: found[name] for name in cases} == {name: [[], []] for name in cases}
    assert all(
        text.startswith("HybridParallelStrategy(gather_after_fit=False): not every process") for text in found["gone"]
    )
