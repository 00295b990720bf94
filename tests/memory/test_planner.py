"""Plans of what a chain keeps: against searches over all schedules, that share nothing with the solvers."""

import heapq
import math
import random
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_eff.memory._planning.chain import Action, Item, Keep, Segment, Stage
from lightning_eff.memory._planning.offload_plan import optimal_with_offload, smallest_budget_with_offload
from lightning_eff.memory._planning.plan import Plan, full, keep_all, segments, sqrt
from lightning_eff.memory._planning.rotor import optimal, smallest_budget

MIB = 2**20
ROUNDING = 1 + 1e-12  #: plans that are equally fast may sum their seconds in another order


def chain(n: int, seed: int, *, kinds: int = 0, unit: int = 1) -> tuple[Stage, ...]:
    """A random chain; of ``kinds`` kinds of block in a row if given (their seconds differ), else every block is another."""
    rng = random.Random(seed)
    width = [rng.randint(1, 30) for _ in range(kinds or n + 1)]
    x = [width[min(i * kinds // n, kinds - 1)] if kinds else width[i] for i in range(n + 1)]
    most = [
        rng.choice([(90, 25, 25), (10, 150, 25), (10, 25, 150)]) for _ in range(kinds or n)
    ]  # each may be what binds
    sizes = [tuple(rng.randint(0, size) for size in of_block) for of_block in most]
    stages = []
    for i in range(n):
        interior, forward, backward = sizes[i * kinds // n if kinds else i]
        seconds = rng.uniform(0.5, 10), rng.uniform(1, 20)
        counts = x[i], interior + x[i + 1], x[i + 1], forward, backward
        again = seconds[0] * rng.uniform(0.3, 1)
        stages.append(Stage(f"h.{i}", *seconds, *(count * unit for count in counts), again))
    return tuple(stages)


def transformer(n: int) -> tuple[Stage, ...]:
    return tuple(Stage(f"h.{i}", 1e-3, 2e-3, 4 * MIB, 60 * MIB, 4 * MIB, 20 * MIB, 24 * MIB) for i in range(n))


def budgets(stages: tuple[Stage, ...], count: int) -> list[int]:
    low, high = smallest_budget(stages), keep_all(stages).peak_bytes
    return [low + (high - low) * k // (count - 1) for k in range(count)]


def least_seconds(stages: tuple[Stage, ...], budget: int) -> float:
    """Dijkstra over everything that may be stored: any run of any block whose input is there, as the budget allows.

    Stored for the backward pass means kept until the backward pass has used it; else what travels goes with the next run.
    """
    n = len(stages)
    x = [stages[0].input_bytes, *(s.output_bytes for s in stages)]
    interior = [s.saved_bytes - s.output_bytes for s in stages]

    x_of = [sum(size for i, size in enumerate(x) if mask >> i & 1) for mask in range(1 << (n + 1))]
    interior_of = [sum(size for i, size in enumerate(interior) if mask >> i & 1) for mask in range(1 << n)]

    def held(t: int, head: int, inputs: int, saved: int) -> int:
        travels = 1 << head if head >= 0 else 0
        return x_of[inputs | saved << 1 | travels | 1] + interior_of[saved] + (x[t + 1] if t < n - 1 else 0)

    start = (n - 1, -1, 1, 0)  # the block whose backward is next, what travels, inputs stored, blocks saved
    seconds, queue = {start: 0.0}, [(0.0, start)]
    while queue:
        now, state = heapq.heappop(queue)
        t, head, inputs, saved = state
        if t < 0:
            return now
        if seconds[state] < now:
            continue
        reached: list[tuple[float, tuple[int, int, int, int]]] = []
        if saved >> t & 1 and inputs >> t & 1:
            gradients = x[t] + (x[n] if t == n - 1 else 0)
            if held(t, -1, inputs, saved) + gradients + stages[t].backward_peak_bytes <= budget:
                reached.append((stages[t].backward_seconds, (t - 1, -1, inputs & ~(1 << t) | 1, saved & ~(1 << t))))
        sources = {i for i in range(t + 1) if inputs >> i & 1} | {i + 1 for i in range(t) if saved >> i & 1}
        for p in sources | ({head} if 0 <= head <= t else set()):
            if saved >> p & 1:
                continue
            for new in {(inputs, saved), (inputs | 1 << p, saved), (inputs | 1 << p, saved | 1 << p)}:
                there = new[0] >> (p + 1) & 1 or new[1] >> p & 1
                if held(t, p, *new) + (0 if there else x[p + 1]) + stages[p].forward_peak_bytes <= budget:
                    stops = p == t < n - 1 and new[1] >> p & 1  # its output is not needed again
                    reached.append((stages[p].last_seconds if stops else stages[p].forward_seconds, (t, p + 1, *new)))
        for cost, then in reached:
            if now + cost < seconds.get(then, math.inf):
                seconds[then] = now + cost
                heapq.heappush(queue, (now + cost, then))
    return math.inf


def plans_inside(start: int, end: int) -> Iterator[tuple[Item, ...]]:
    """Every plan without offloading for the blocks, but those of a single Segment, which only runs them once more."""
    if start == end:
        yield ()
        return
    for rest in plans_inside(start + 1, end):
        yield (Keep(start), *rest)
    for k in range(start + 1, end):
        for inner in plans_inside(start, k):
            for rest in plans_inside(k, end):
                yield (Segment(start, k, inner), *rest)


def plans_with_offload(start: int, end: int) -> Iterator[tuple[Item, ...]]:
    if start == end:
        yield ()
        return
    for offload in (False, True):
        for rest in plans_with_offload(start + 1, end):
            yield (Keep(start, offload), *rest)
        for k in range(start + 1, end + 1):
            for inner in plans_inside(start, k):
                for rest in plans_with_offload(k, end):
                    yield (Segment(start, k, inner, offload), *rest)


@pytest.mark.parametrize(("n", "seed"), [(n, seed) for n in (1, 2, 3, 4, 5, 6) for seed in range(4)] + [(7, 0), (8, 1)])
def test_optimal_is_as_fast_as_the_fastest_of_all_persistent_schedules(n: int, seed: int) -> None:
    stages = chain(n, seed)
    for budget in budgets(stages, 5)[:: 1 if n < 7 else 3]:
        plan = optimal(stages, budget)
        assert plan.peak_bytes <= budget
        assert plan.seconds == pytest.approx(least_seconds(stages, budget), rel=1e-12)
    assert least_seconds(stages, smallest_budget(stages) - 1) == math.inf


@pytest.mark.parametrize("n", [6, 12, 24, 48])
@pytest.mark.parametrize("kinds", [0, 1, 3])
def test_no_peak_is_over_the_budget_and_more_memory_is_never_slower(n: int, kinds: int) -> None:
    stages = chain(n, seed=n, kinds=kinds, unit=1000 if kinds else 1)
    before = math.inf
    for budget in budgets(stages, 4 if n == 48 else 9):
        plan = optimal(stages, budget)
        assert plan.budget_bytes == budget and plan.peak_bytes <= budget
        assert plan.seconds <= before * ROUNDING
        before = plan.seconds
    assert before == keep_all(stages).seconds


@pytest.mark.parametrize("n", [6, 9, 12, 20, 48])
@pytest.mark.parametrize("kinds", [0, 1])
def test_never_slower_than_chen_at_the_memory_that_he_takes(n: int, kinds: int) -> None:
    stages = chain(n, seed=100 + n, kinds=kinds)
    for chen in (sqrt(stages), full(stages), segments(stages, n // 3))[: 1 if n == 48 else 3]:
        plan = optimal(stages, chen.peak_bytes)
        assert plan.peak_bytes <= chen.peak_bytes and plan.seconds <= chen.seconds * ROUNDING
    uneven = optimal(stages, sqrt(stages).peak_bytes).seconds / sqrt(stages).seconds
    assert kinds or uneven < 0.995, "in chains of different blocks there is something to gain"
    assert optimal(stages, sqrt(stages).peak_bytes, slots=2).seconds <= sqrt(stages).seconds * ROUNDING


def odd(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same chain a million times as large and less than 0.1 % off: its sizes are too many to be told apart."""
    return tuple(
        Stage(
            s.name,
            s.forward_seconds,
            s.backward_seconds,
            *(10**6 * b + 7919 * b * (i + 1) % 991 for b in sizes),
            s.again_seconds,
        )
        for i, s in enumerate(stages)
        for sizes in [(s.input_bytes, s.saved_bytes, s.output_bytes, s.forward_peak_bytes, s.backward_peak_bytes)]
    )


def test_rounding_costs_little_where_sizes_are_too_many_to_be_exact() -> None:
    stages = chain(24, seed=7)
    for exactly, rounded in zip(budgets(stages, 6)[1:], budgets(odd(stages), 6)[1:], strict=True):
        assert optimal(odd(stages), rounded).seconds <= 1.01 * optimal(stages, exactly).seconds


def test_more_memory_is_never_slower_however_coarse_the_rounding() -> None:
    stages = odd(chain(16, seed=2))
    seconds = [optimal(stages, budget, slots=12).seconds for budget in budgets(stages, 24)]
    assert all(more <= less * ROUNDING for less, more in pairwise(seconds)) and len(set(seconds)) > 8


def test_48_blocks_take_less_than_a_second() -> None:
    for stages in (chain(48, seed=1), transformer(48)):
        budget = budgets(stages, 3)[1]
        before = time.process_time()
        optimal(stages, budget)
        assert time.process_time() - before < 3, "0.1 to 0.5 s on an idle machine"


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    stages = chain(12, seed=3)
    with pytest.raises(
        ValueError, match=r"got budget_bytes=7 .*expected at least (\d+) .*Raise the memory budget"
    ) as error:
        optimal(stages, 7)
    found = re.search(r"at least (\d+)", str(error.value))
    assert found and int(found[1]) == smallest_budget(stages)
    assert optimal(stages, smallest_budget(stages)).peak_bytes == smallest_budget(stages)
    with pytest.raises(ValueError, match="expected at least"):
        optimal(stages, smallest_budget(stages) - 1)
    with pytest.raises(ValueError, match=f"expected at least {smallest_budget_with_offload(stages)} "):
        optimal_with_offload(stages, 7, 10.0)
    for offload in (lambda: optimal(stages, 10**6, slots=1), lambda: optimal_with_offload(stages, 10**6, 1.0, slots=1)):
        with pytest.raises(ValueError, match="got slots=1; expected >= 2"):
            offload()
    with pytest.raises(ValueError, match="bandwidth_bytes_per_second=-1; expected a number >= 0"):
        optimal_with_offload(stages, 10**6, -1)


@pytest.mark.parametrize(("n", "seed"), [(n, seed) for n in (1, 2, 3, 4) for seed in range(4)] + [(5, 4)])
def test_offload_is_as_fast_as_the_fastest_of_all_such_plans(n: int, seed: int) -> None:
    stages = chain(n, seed)
    low, high = smallest_budget_with_offload(stages), keep_all(stages).peak_bytes
    rate = random.Random(seed).choice([1.0, 3.0, 8.0, 20.0, 60.0])
    for budget in sorted({low, low + (high - low) // 4, low + (high - low) // 2})[-1 if n == 5 else 0 :]:
        tried = [Plan(stages, items, budget, rate) for items in plans_with_offload(0, n)]
        fastest = min(plan.seconds for plan in tried if plan.peak_bytes <= budget)
        plan = optimal_with_offload(stages, budget, rate)
        assert plan.peak_bytes <= budget
        assert plan.seconds == pytest.approx(fastest, rel=1e-12)
    if n <= 3:
        assert min(Plan(stages, items, low - 1, rate).peak_bytes for items in plans_with_offload(0, n)) == low


def test_offload_without_bandwidth_is_optimal_and_with_plenty_costs_no_time() -> None:
    stages = transformer(12)
    for budget in budgets(stages, 4):
        assert optimal_with_offload(stages, budget, 0.0) == optimal(stages, budget)
        some = [optimal_with_offload(stages, budget, rate) for rate in (1e9, 1e10, 1e11, 1e13)]
        seconds = [optimal(stages, budget).seconds, *(plan.seconds for plan in some)]
        assert all(faster <= slower * ROUNDING for slower, faster in pairwise(seconds))
        assert all(plan.peak_bytes <= budget for plan in some)
        assert seconds[-1] == pytest.approx(keep_all(stages).seconds, rel=0.01)


@pytest.mark.parametrize("n", [12, 48])
def test_offload_in_long_chains_is_within_the_budget_and_never_slower_than_without(n: int) -> None:
    stages = chain(n, seed=n, kinds=3, unit=1000)
    for budget in budgets(stages, 6)[1:2] if n == 48 else budgets(stages, 4)[1:3]:
        before = time.process_time()
        plan = optimal_with_offload(stages, budget, 20_000.0)
        assert time.process_time() - before < (2 if n == 12 else 10), "0.03 s and 0.8 s on an idle machine"
        assert plan.peak_bytes <= budget
        assert plan.seconds <= optimal(stages, budget).seconds * ROUNDING
        assert plan.offloaded_bytes > 0


def two_of_each() -> Plan:
    """Blocks of x = 10, interior = 50, forward_peak = 3, backward_peak = 4, 1 s forward and 2 s backward."""
    stages = tuple(Stage(f"h.{i}", 1.0, 2.0, 10, 60, 10, 3, 4) for i in range(4))
    return Plan(stages, (Segment(0, 3, (Segment(0, 2, (Keep(0), Keep(1))), Keep(2))), Keep(3)), 250)


def test_the_prediction_counted_by_hand() -> None:
    plan = two_of_each()
    assert plan.forward_calls == (3, 3, 2, 1) and plan.total_forward_calls == 9
    assert plan.seconds == 9 * 1 + 4 * 2
    forward = [
        10 + 10 + 3,
        10 + 20 + 3,
        10 + 20 + 3,
        10 + 10 + 60 + 3,
    ]  # x_0, what comes in and goes out, block 3 saves
    last = [10 + 10 + 60 + 20 + 4]  # x_0, x_3, what block 3 saved, two gradients
    second = [10 + 10 + 10 + 3, 10 + 10 + 20 + 3, 10 + 10 + 10 + 60 + 3, 10 + 10 + 60 + 20 + 4]  # gradient of x_3 first
    third = [10 + 10 + 60 + 3, 10 + 10 + 60 + 60 + 3, 10 + 60 + 60 + 20 + 4, 10 + 60 + 20 + 4]
    assert [event.held_bytes for event in plan.schedule] == forward + last + second + third
    kinds = ["forward"] * 4 + ["backward"] + ["again"] * 3 + ["backward"] + ["again"] * 2 + ["backward"] * 2
    assert [event.kind for event in plan.schedule] == kinds
    assert [event.block for event in plan.schedule] == [0, 1, 2, 3, 3, 0, 1, 2, 2, 0, 1, 1, 0]
    assert plan.peak_bytes == 154
    assert plan.actions == (Action.RECOMPUTE,) * 3 + (Action.KEEP,)


def test_only_the_last_block_of_a_segment_stops_at_what_it_saves_last() -> None:
    stages = tuple(Stage(f"h.{i}", 1.0, 2.0, 10, 60, 10, 3, 4, 0.25) for i in range(4))
    plan = Plan(stages, two_of_each().items)
    again = {(event.block, event.end_seconds - event.start_seconds) for event in plan.schedule if event.kind == "again"}
    assert again == {(0, 1.0), (1, 1.0), (2, 0.25), (1, 0.25)}, "block 1 runs again without saving, and once to save"
    assert keep_all(stages).seconds == 4 * 3.0 and full(stages).seconds == 4 * 3.25


def test_a_segment_at_the_end_leaves_no_output_behind() -> None:
    inner = Segment(0, 2, (Keep(0), Keep(1))), Segment(2, 4, (Keep(2), Keep(3)))
    plan = Plan(two_of_each().stages, (Segment(0, 4, inner),))
    forward = [20 + 3, 30 + 3, 30 + 3, 30 + 3]  # x_0, what comes in and goes out
    again = [30 + 3, 40 + 3, 40 + 3, 50 + 3]  # with the gradient of x_4, and x_2 once it is stored
    last = [40 + 50 + 3, 50 + 100 + 3, 60 + 100 + 4, 50 + 50 + 4]  # x_4 is there from block 3 on only
    first = [30 + 50 + 3, 40 + 100 + 3, 50 + 100 + 4, 40 + 50 + 4]
    assert [event.held_bytes for event in plan.schedule] == forward + again + last + first
    assert plan.forward_calls == (3, 3, 3, 3)


def test_copies_counted_by_hand() -> None:
    stages = two_of_each().stages
    items = (Keep(0, offload=True), Keep(1), Keep(2), Keep(3))
    plan = Plan(stages, items, 223, 10.0)  # 60 bytes go, in 6 s
    assert plan.offloaded_bytes == 60
    # Forward: 60 unsent as block 1 begins, 50 at block 2, 40 at block 3, where there is room for 30. At the turn 20.
    forward = [event for event in plan.schedule if event.start_seconds < 7]
    assert [(e.kind, e.block, e.copying_bytes) for e in forward] == [
        ("forward", 0, 0),
        ("forward", 1, 60),
        ("forward", 2, 50),
        ("wait", -1, 40),
        ("forward", 3, 30),
        ("wait", -1, 20),
    ]
    assert plan.room(3)[0] == 223 - (2 * 60 + 70 + 3) == 30
    # Backward: 60 are to be there before block 0's turn. Block 1 leaves room for all, block 2 for 49, block 3 for none.
    assert [plan.room(k)[1] for k in (3, 2, 1, 0)] == [9, 40, 60, 0]
    assert plan.peak_bytes == 223


def test_plans_of_the_literature() -> None:
    stages = transformer(9)
    assert keep_all(stages).forward_calls == (1,) * 9 and full(stages).forward_calls == (2,) * 9
    assert sqrt(stages).forward_calls == (2,) * 6 + (1,) * 3
    assert [len(sqrt(transformer(n)).items) for n in (1, 2, 3, 4, 7, 48)] == [1, 2, 3, 3, 5, 13]
    assert full(stages).peak_bytes < sqrt(stages).peak_bytes < keep_all(stages).peak_bytes


@pytest.mark.parametrize(
    "items",
    [
        (),
        (Keep(0),),
        (Keep(1), Keep(0)),
        (Keep(0), Keep(1), Keep(2)),
        (Segment(0, 2, (Keep(0),)),),
        (Segment(0, 2, (Keep(0), Keep(1, offload=True))),),
        (Segment(0, 0, ()), Keep(0), Keep(1)),
        (Segment(0, 2, ()),),
    ],
)
def test_items_that_are_no_plan_are_refused(items: tuple[Item, ...]) -> None:
    with pytest.raises(ValueError, match="expected each of the blocks 0 to 1 once"):
        Plan(transformer(2), items, None, 1.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got no stages"):
        Plan((), ())
    with pytest.raises(ValueError, match=r"got offloaded items and bandwidth_bytes_per_second=0\.0"):
        Plan(transformer(1), (Keep(0, offload=True),))
    with pytest.raises(ValueError, match=r"Stage 'h': got forward_seconds=-1.0; expected a finite number >= 0"):
        Stage("h", -1.0, 0.0, 1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match="expected output_bytes <= saved_bytes"):
        Stage("h", 1.0, 1.0, 1, 1, 2, 0, 0)
    with pytest.raises(ValueError, match="expected again_seconds <= forward_seconds"):
        Stage("h", 1.0, 1.0, 1, 1, 1, 0, 0, 1.1)


@pytest.mark.parametrize("n", [6, 24])
def test_text_and_picture(n: int, tmp_path: Path) -> None:
    stages = transformer(n)
    plan = optimal_with_offload(stages, budgets(stages, 4)[1], 2e10)
    text = str(plan)
    assert f"{plan.total_forward_calls} forward runs of {n} blocks" in text
    assert "of a budget of" in text and "to the host and back" in text and "storing all takes" in text
    rows = text.splitlines()[1:-2]
    assert rows[0].startswith("h.0 ") and f"h.{n - 1} " in rows[-1]
    plan.draw(tmp_path / "plan.png")
    picture = (tmp_path / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
