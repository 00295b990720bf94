"""What techniques declare and strategies say of themselves, and the refusals that follow."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_eff import CompressedDDPStrategy, HybridParallelStrategy
from lightning_eff._core._needs.needs import PLAIN, UNMET, UNTRIED, WORDS, Need, Part, refused
from lightning_eff._core._needs.offers import is_plain, parts_of, refusal
from lightning_eff._core._run import replicas
from lightning_eff._core._run.replicas import Replicas


def hybrid(
    *, data: int = 1, tensor: int = 1, pipeline: int = 1, context: int = 1, shard: bool = True
) -> HybridParallelStrategy:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "context_parallel_size": context}
    return HybridParallelStrategy(data, shard=shard, **sizes)


def test_strategies_say_how_they_divide_a_run() -> None:
    assert parts_of(pl.strategies.SingleDeviceStrategy()) == parts_of(pl.strategies.DDPStrategy()) == ()
    assert parts_of(pl.strategies.FSDPStrategy()) == (Part.FLAT,)
    assert parts_of(pl.strategies.ModelParallelStrategy(2, 1)) == (Part.SHARD, Part.ITSELF)
    assert parts_of(pl.strategies.ModelParallelStrategy(1, 2)) == (Part.SHARD, Part.TENSOR, Part.ITSELF)
    assert parts_of(CompressedDDPStrategy("bf16")) == (Part.COMPRESSED,)
    assert parts_of(hybrid()) == ()
    assert parts_of(hybrid(data=2, shard=False)) == (Part.COPIES,)
    assert parts_of(hybrid(data=2, tensor=2, pipeline=2)) == (Part.SHARD, Part.TENSOR, Part.PIPELINE)
    assert parts_of(hybrid(context=2)) == (Part.SHARD, Part.CONTEXT)
    assert parts_of(hybrid(context=2, shard=False)) == (Part.CONTEXT,)
    assert refused(Need.STEP | Need.BLOCKS, {}, [Part.CONTEXT]) == {Part.CONTEXT: UNTRIED}
    assert not refused(Need.STEP | Need.BATCH | Need.PIECES, {}, [Part.CONTEXT])

    class Another(pl.strategies.Strategy):
        """Of somebody else."""

    Another.__abstractmethods__ = frozenset()
    assert parts_of(Another()) == (Part.UNKNOWN,)  # pyright: ignore[reportAbstractUsage]


def test_whole_modules_are_plain() -> None:
    assert is_plain(pl.strategies.DDPStrategy()) and is_plain(hybrid(data=2, shard=False)) and is_plain(hybrid())
    assert not is_plain(hybrid(data=2)) and not is_plain(pl.strategies.FSDPStrategy())


def test_each_need_has_words_and_divisions() -> None:
    assert {*WORDS} == {*UNMET} == {*Need}
    for need in Need:
        assert Part.UNKNOWN in UNMET[need], "of a strategy that is not known nothing is expected"
        assert need is Need.DDP or not UNMET[need] & PLAIN


def test_reasons_of_its_own_go_before_needs() -> None:
    assert refused(Need.BATCH, {}, [*Part]) == dict.fromkeys((Part.FLAT, Part.ENGINE, Part.UNKNOWN), UNTRIED)
    assert refused(Need.WHOLE, {}, [Part.FLAT]) == {Part.FLAT: f"the technique {WORDS[Need.WHOLE]}"}
    own = {Part.TENSOR: "heads differ", Part.PIPELINE: ""}
    assert refused(Need.WHOLE, own, [Part.TENSOR, Part.PIPELINE]) == {Part.TENSOR: "heads differ"}
    assert refused(Need.BLOCKS, own, [Part.TENSOR, Part.FLAT]) == {Part.TENSOR: "heads differ", Part.FLAT: UNTRIED}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            lambda: hybrid(data=2, pipeline=2),
            "T(a=1): HybridParallelStrategy runs each block in one process only, and on parts of the batch, and the technique"
            " decides which blocks run. Use HybridParallelStrategy(pipeline_parallel_size=1) or strategy='ddp', or remove T.",
        ),
        (
            pl.strategies.FSDPStrategy,
            "T(a=1): FSDPStrategy joins parameters into flat tensors before it cuts them into pieces, and the technique is"
            " not tested there. Use HybridParallelStrategy or strategy='ddp', or remove T.",
        ),
        (lambda: hybrid(data=2, tensor=2), None),
        (pl.strategies.DDPStrategy, None),
    ],
)
def test_a_refusal_says_why_and_what_to_do(strategy: Any, message: str | None) -> None:
    reasons = {Part.PIPELINE: "the technique decides which blocks run"}
    assert refusal("T(a=1)", Need.BLOCKS, reasons, strategy()) == message


@pytest.mark.parametrize(("num_replicas", "every"), [(4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0, 0, 0, 0])])
def test_processes_of_one_replica_count_once(
    num_replicas: int, every: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 3 of four, of which neighbours share a replica, and which all say their rank."""

    def gathered(size: int, value: Any) -> list[Any]:
        return every if value == every[3] and size == 4 else ["a", "b", "c", "d"]

    monkeypatch.setattr(replicas, "gathered", gathered)
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": every[3]})
    found = Replicas(SimpleNamespace(global_rank=3, world_size=4, strategy=strategy))  # pyright: ignore[reportArgumentType]
    assert (found.process, found.index, found.count) == (3, every[3], num_replicas)
    assert found.everyone("d") == ["a", "b", "c", "d"]
    assert found.gather("d") == [["a", "b", "c", "d"][every.index(i)] for i in range(num_replicas)]
