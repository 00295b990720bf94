"""More models, four ranks, and dp x tp under FSDP2: the long grid of tensor parallelism."""

from typing import Any

import pytest

from tests.strategies.launch import launch
from tests.strategies.test_tensor import is_right

MODELS = ["mistral", "mixtral", "gemma2", "gpt_neox", "opt", "bloom", "falcon", "phi3", "gpt_bigcode", "olmo2", "t5"]
MORE = ["sequence:llama", "sequence:qwen3", "sequence:bert", "autocast:llama", "autocast:gpt2", "float8:gpt2"]
FOUR = ["tiny_gpt", "hand", "llama", "llama_1kv", "fused", "fused_gqa", "qwen3", "qk_norm", "odd"]
FSDP = [
    "tiny_gpt",
    "hand",
    "hand_tied",
    "llama",
    "llama_tied",
    "llama_1kv",
    "gpt2",
    "bert",
    "vit",
    "qwen3",
    "fused",
    "fused_gqa",
    "qk_norm",
    "odd",
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_models() -> None:
    results = launch("tests.strategies.tensor_jobs", "run_cases", *(f"equal:{m}" for m in MODELS), *MORE, world_size=2)
    for name in MODELS:
        is_right(results[f"equal:{name}"])
        assert abs(results[f"equal:{name}"]["share"] * 2 - 1) < 0.05, name
    for name in MORE:
        low = not name.startswith("sequence")
        is_right(results[name], **({"grad": 2e-2, "loss": 5e-3} if low else {}))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_four_ranks() -> None:
    names = [f"equal:{name}" for name in FOUR] + [f"fsdp:{name}" for name in FSDP] + ["equal:gpt2"]
    results = launch("tests.strategies.tensor_jobs", "run_cases", *names, world_size=4)
    for name in FOUR:
        is_right(results[f"equal:{name}"])
        assert abs(results[f"equal:{name}"]["share"] * 4 - 1) < 0.05, name
    assert "2 attention heads" in results["equal:gpt2"]["error"]
    for name in FSDP:
        is_trained(results[f"fsdp:{name}"], name)


def is_trained(result: dict[str, Any], name: str) -> None:
    """Three steps of dp2 x tp2 gave one process's parameters."""
    assert "error" not in result, (name, result["error"])
    assert result["first"] == 0.0, name  # full_tensor() before the first step
    assert result["grad"] <= 5e-7 and result["param"] <= 5e-7 and result["keys"], (name, result)
    assert abs(result["share"] * 4 - 1) < 0.05, (name, result["share"])
