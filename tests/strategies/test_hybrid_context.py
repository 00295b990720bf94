"""Context parallelism in two processes: the losses, weights and checkpoints of one process, and what is refused."""

import re
from typing import Any, cast

import pytest
import torch

from lightning_eff.strategies._context.messages import Share, parts_of
from tests.conftest import Once
from tests.runs import largest
from tests.strategies.context_jobs import train
from tests.strategies.hybrid_jobs import Settings, apart, observe_logs, values
from tests.strategies.launch import launch

JOBS = "tests.strategies.context_jobs"
TWO = {"context_parallel_size": 2}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def rotary(strategy: Settings | str = TWO, **module: Any) -> Settings:
    return {"model": "rotary", "module": module, "strategy": strategy}


EXACT: dict[str, Settings] = {
    "learned positions, by name": {"model": "tiny_gpt", "strategy": "hybrid_cp2"},
    "rotary arguments, padded": {"model": "llama", "strategy": TWO, "padded": True, "fit": CLIPPED},
    "bidirectional, masked": {"model": "bert", "strategy": TWO, "padded": True},
    "bidirectional, uneven": {"model": "vit", "strategy": TWO},
    "rotary table": rotary(),
    "rotary range": rotary(positions="range"),
    "mask of the block": rotary(positions="mask"),
    "heads that do not divide": rotary(heads=3),
    "replicas": rotary({**TWO, "shard": False}),
    "tensor given to all blocks": rotary(mixing="condition"),
    "sum of hidden states": rotary(mixing="skip", lr=1e-3),
    "checkpoint": rotary(mixing="checkpoint"),
    "reentrant checkpoint": rotary(mixing="reentrant"),
}
REFUSED: dict[str, tuple[Settings, str]] = {
    "convolution": (rotary(mixing="convolution"), "off by .* statistics over tokens"),
    "a router's loss": (rotary(mixing="router"), "router.weight"),
    "checkpoint inside": (rotary(mixing="inner"), "CheckpointError: .*checkpoint whole blocks"),
    "one rank in a whole step": (
        rotary(mixing="rank whole"),
        "another rank raised .* MemoryError: the second rank alone",
    ),
    "one rank in a trial": (rotary(mixing="rank divided"), "MemoryError: the second rank alone"),
    "one rank in a later block": (
        rotary(mixing="rank later"),
        "in the whole step it raised MemoryError: the second rank",
    ),
    "by hand": (rotary(positions="by hand"), "a softmax by hand, .*scaled_dot_product_attention"),
}


@pytest.fixture(scope="module")
def two(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes find, one start for all."""
    directory = tmp_path_factory.mktemp("context")
    given = EXACT | {name: case for name, (case, _) in REFUSED.items()}

    def start() -> dict[str, Any]:
        cases = {name: {**case, "devices": 2} for name, case in given.items()}
        return launch(JOBS, "everything", str(directory), cases, world_size=2)

    return once("context", start)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXACT)
def test_two_processes_train_as_one(name: str, two: dict[str, Any]) -> None:
    case, found = EXACT[name], two["cases"][name]
    losses, model, _ = train({**case, "strategy": "auto", "devices": 1})
    assert isinstance(found["losses"], list), found
    assert largest(abs(a - b) for a, b in zip(found["losses"], losses, strict=True)) < 1e-5
    assert abs(losses[-1] - losses[0]) > 1e-3, "nothing was learnt, so nothing was compared"
    weights = {key: torch.tensor(value) for key, value in found["weights"].items()}
    assert apart(weights, values(model)) < (1e-3 if case["model"] in ("tiny_gpt", "vit") else 1e-5)  # AdamW
    assert found["gathers"] > 0, "nothing was divided"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name: str, two: dict[str, Any]) -> None:
    assert re.search(rf"^HybridParallelStrategy\(context_parallel_size=2\): .*{REFUSED[name][1]}", two["cases"][name])


def test_runs_resume_bit_for_bit(two: dict[str, Any]) -> None:
    assert two["resumed"] == {"shards": [{}, {}], "replicas": [{}, {}]}


def test_a_part_keeps_no_more_than_itself_in_memory() -> None:
    share, whole = Share(cast("Any", None), 1, parts_of(5, 2)), torch.randn(1, 5, 4)
    part = share.of(whole, 1)
    assert torch.equal(part, whole[:, 3:]) and part.untyped_storage().nbytes() == part.nbytes


def test_blocks_keep_no_more_than_half_of_the_bytes(two: dict[str, Any]) -> None:
    whole, divided = two["bytes"]
    assert 0.4 * whole < divided <= 0.5 * whole  # less, because one process keeps the whole of qkv for a view of v


def test_dropout_differs_between_tokens_of_ranks(two: dict[str, Any]) -> None:
    first, second = two["dropped"]
    assert first != second, "the ranks dropped the same features of their tokens"
    assert two["random"][0] == two["random"][1], "the ranks' common random numbers went apart"


def test_evaluation_and_metrics_count_each_sample_once(two: dict[str, Any]) -> None:
    (alone,) = observe_logs("auto", 1)["ranks"]
    for rank in two["logs"]["ranks"]:
        assert rank["predicted"] == alone["predicted"]
        assert rank["logged"].keys() == alone["logged"].keys()
        for name, value in alone["logged"].items():
            assert rank["logged"][name] == pytest.approx(value, abs=1e-5), name
