"""Which blocks lie where, how batches are split, and in which order PyTorch's schedules work: no process group needed."""

import dataclasses
import itertools
import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from lightning_eff.strategies._pipeline import layout
from lightning_eff.strategies._pipeline.batch import content, digest, signature, split
from lightning_eff.strategies._pipeline.layout import Layout, balanced
from lightning_eff.strategies._pipeline.logging import Record
from lightning_eff.strategies._pipeline.order import SCHEDULES, SPLIT_BACKWARD, operations, schedule_name, stage_ranks
from lightning_eff.strategies._pipeline.streams import Stream


def brute(costs: list[float], num_stages: int, last: float) -> float:
    """The smallest possible cost of the dearest stage, by trying all splits."""
    if num_stages == 1:
        return sum(costs) + last
    ends = range(1, len(costs) - num_stages + 2)
    return min(max(sum(costs[:end]), brute(costs[end:], num_stages - 1, last)) for end in ends)


def test_balanced_is_the_best_split() -> None:
    rng = random.Random(0)
    for _ in range(60):
        costs = [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 8))]
        num_stages, last = rng.randint(1, len(costs)), float(rng.randint(0, 9))
        sizes = balanced(costs, num_stages, last)
        ends = np.cumsum([0, *sizes])
        found = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        found[-1] += last
        assert min(sizes) >= 1 and sum(sizes) == len(costs) and len(sizes) == num_stages
        assert max(found) == brute(costs, num_stages, last)


def test_equal_blocks_are_split_evenly_and_a_head_counts() -> None:
    assert sorted(balanced([1.0] * 9, 4)) == [2, 2, 2, 3]
    assert balanced([7.0] * 12, 4, last=38.0) == [3, 4, 4, 1]  # the head is worth more than five blocks


def build(num_blocks: int = 8, **kwargs: Any) -> Layout:
    module = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))})
    settings: dict[str, Any] = {"schedule": "1F1B", "num_ranks": 2, "split": "balanced", **kwargs}
    return layout.layout(module, list(module["blocks"].children()), path="blocks", who="S", **settings)


def test_stages_and_ranks() -> None:
    assert build().bounds == ((0, 4), (4, 8)) and build().ranks == (0, 1)
    assert build(schedule="Interleaved1F1B").ranks == (0, 1, 0, 1)
    assert build(schedule="ZBVZeroBubble").ranks == (0, 1, 1, 0)
    assert build(schedule="DualPipeV", num_ranks=4).ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert build(split=[1, 7]).bounds == ((0, 1), (1, 8))
    assert build(schedule="LoopedBFS", split=[1, 1, 1, 1, 2, 2]).ranks == (0, 1, 0, 1, 0, 1)
    assert build(schedule="ZBVZeroBubble").stages_of(0) == [0, 3] and build().last_rank == 1
    assert [build().stage_of(block) for block in (0, 3, 4, 7)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_blocks": 3, "num_ranks": 4}, ["pipeline_parallel_size=4", "3 blocks", "at most 3 stages"]),
        ({"num_blocks": 3, "schedule": "ZBVZeroBubble"}, ["4 stages", "3 blocks", "1F1B"]),
        ({"split": [4, 3]}, ["[4, 3]", "7 blocks", "sum 8"]),
        ({"split": [8]}, ["1 stages", "2 numbers"]),
        ({"split": [0, 8]}, ["numbers >= 1"]),
        ({"split": "evenly"}, ["'evenly'", "'balanced'", "[4, 4]"]),
        ({"split": [2, 2, 2, 2], "schedule": "1F1B"}, ["4 stages", "2 numbers"]),
    ],
)
def test_what_does_not_fit_is_refused(kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^S\(") as error:
        build(**kwargs)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_schedules_are_known_by_name() -> None:
    assert schedule_name("zbvzerobubble", who="S") == "ZBVZeroBubble"
    with pytest.raises(ValueError, match=r"S\(schedule='2F2B'\).*GPipe, 1F1B, Interleaved1F1B.*DualPipeV"):
        schedule_name("2F2B", who="S")


def test_numbers_of_micro_batches() -> None:
    where = build()
    choose = lambda size, given=None, most=None, at=where: layout.num_microbatches(  # noqa: E731
        size, given, at, most=most, who="S"
    )
    assert choose(8, 4) == (4, "1F1B") and choose(12) == (4, "1F1B") and choose(7) == (7, "1F1B")
    assert choose(6, 4, most=8) == (3, "1F1B")  # the largest number of equal parts below four
    assert choose(1, 4, most=8) == (1, "GPipe")  # fewer than 1F1B can run; GPipe computes the same
    assert choose(2, 8, most=8, at=build(schedule="DualPipeV")) == (2, "ZBVZeroBubble")
    with pytest.raises(ValueError, match=r"6 samples for 4 micro-batches: 6 / 4 = 1\.50.*\[2, 3, 6\].*drop_last"):
        choose(6, 4)
    with pytest.raises(ValueError, match="1 samples for schedule='1F1B' on 2 stages"):
        choose(1)


@pytest.mark.parametrize(("number", "schedule"), [(1, "1F1B"), (3, "DualPipeV"), (5, "Interleaved1F1B")])
def test_a_number_that_a_schedule_cannot_run(number: int, schedule: str) -> None:
    with pytest.raises(ValueError, match=rf"S\(num_microbatches={number}, schedule='{schedule}'\).*such as \["):
        layout.check_num_microbatches(number, build(schedule=schedule), who="S")
    with pytest.raises(ValueError, match="an integer >= 1"):
        layout.check_num_microbatches(0, build(), who="S")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_order_of_operations(schedule: str, num_ranks: int) -> None:
    """Every stage runs every micro-batch forward and backward once, on its own rank, in an order that can be run."""
    per_rank = 1 if schedule in ("GPipe", "1F1B") else 2
    num_stages, number = per_rank * num_ranks, 8
    ordered = operations(schedule, num_ranks, num_stages, number)
    ranks = stage_ranks(schedule, num_ranks, num_stages)
    counts = Counter((stage, kind) for rank in ordered for stage, kind, _ in rank)
    for stage in range(num_stages):
        assert counts[stage, "F"] == number
        assert counts[stage, "B"] + counts[stage, "I"] == number and counts[stage, "I"] == counts[stage, "W"]
    assert (sum(n for (_, kind), n in counts.items() if kind == "W") > 0) == (schedule in SPLIT_BACKWARD)
    assert all(ranks[stage] == rank for rank, row in enumerate(ordered) for stage, _, _ in row)
    done: set[tuple[int, str, int]] = set()
    rows = [list(row) for row in ordered]
    while any(rows):
        ready = [row for row in rows if row and _can_run(row[0], done, num_stages)]
        assert ready, f"stuck at {[row[:1] for row in rows]}"
        for row in ready:
            stage, kind, mb = row.pop(0)
            done.add((stage, "B" if kind == "I" else kind, mb))


def _can_run(operation: tuple[int, str, int], done: set[tuple[int, str, int]], num_stages: int) -> bool:
    stage, kind, mb = operation
    if kind == "F":
        return stage == 0 or (stage - 1, "F", mb) in done
    if kind == "W":
        return (stage, "B", mb) in done
    return (stage, "F", mb) in done and (stage == num_stages - 1 or (stage + 1, "B", mb) in done)


def test_one_forward_one_backward_by_hand() -> None:
    """Narayanan et al. 2019, arXiv:1806.03377, figure 4: rank 0 warms up by two, the last alternates at once."""
    first, last = operations("1F1B", 2, 2, 3)
    assert [f"{kind}{mb}" for _, kind, mb in first] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [f"{kind}{mb}" for _, kind, mb in last] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    with pytest.raises(ValueError, match="got 1 micro-batches for 2 stages"):
        operations("1F1B", 2, 2, 1)


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    shared: torch.Tensor
    count: int


def test_batches_of_any_make_are_split() -> None:
    x = torch.arange(12).reshape(4, 3)
    batch = {
        "pair": Pair(x, ["a", "b", "c", "d"]),
        "frozen": Frozen(x, torch.ones(5), 7),
        "tuple": (x, [x, "text"]),
        "array": np.arange(4),
    }
    first, second = split(batch, 2)
    assert torch.equal(second["pair"].x, x[2:]) and second["pair"].names == ["c", "d"]
    assert torch.equal(first["frozen"].x, x[:2]) and first["frozen"].shared.shape == (5,) and first["frozen"].count == 7
    assert torch.equal(second["tuple"][1][0], x[2:]) and second["tuple"][1][1] == "text"
    assert second["array"].tolist() == [2, 3]
    assert split(batch, 1)[0] is batch
    with pytest.raises(ValueError, match="PackedSequence"):
        split({"x": x, "packed": pack_sequence([x[0], x[1]])}, 2)


def test_batches_are_told_apart() -> None:
    x = torch.randn(4, 3)
    assert signature({"x": x}) == signature({"x": x + 1}) != signature({"x": x[:, :2]})
    assert signature({"x": x}) != signature({"x": x.double()})
    assert content([x]) == content([x.clone()]) != content([x.flip(0)])
    assert content([x.bfloat16()]) == content([x.bfloat16()]) and content([x > 0]) != content([x <= 0])
    assert 0 <= digest("a") < 2**62


def test_values_over_micro_batches() -> None:
    values = [torch.tensor(1.0), torch.tensor([5.0])]
    assert float(Record({}, values).value()) == 3 and float(Record({"reduce_fx": "sum"}, values).value()) == 6
    assert float(Record({"reduce_fx": torch.max}, values).value()) == 5
    assert float(Record({"reduce_fx": "min"}, values).value()) == 1
    assert float(Record({}, values, [3, 1]).value()) == 2  # weighted by batch_size=
    assert float(Record({"reduce_fx": lambda t: t[0] * 7}, values).value()) == 7


def test_streams_follow_from_their_key_alone() -> None:
    def draws(stream: Stream, block: int) -> list[float]:
        stream.enter(block)
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    stream = Stream(1, "train", 2, 3)
    expected = draws(stream, 4)
    torch.rand(9)
    assert draws(Stream(1, "train", 2, 3), 4) == expected
    others = [Stream(0, "train", 2, 3), Stream(1, "evaluate", 2, 3), Stream(1, "train", 1, 3), Stream(1, "train", 2, 2)]
    for other in others:
        assert all(a != b for a, b in zip(draws(other, 4), expected, strict=True))
    assert draws(stream, 5) != expected
