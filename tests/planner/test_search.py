"""The search finds what trying everything finds, its bounds hold, and memory is what can be counted by hand."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from lightning_eff.planner.accelerators import ACCELERATORS, Accelerator, find_accelerator
from lightning_eff.planner.costs import Assumptions
from lightning_eff.planner.evaluator import Evaluator
from lightning_eff.planner.layouts import Layout, enumerate_layouts, split_blocks
from lightning_eff.planner.memory import moments_of
from lightning_eff.planner.profiling import ModuleProfile, precision_of
from lightning_eff.planner.report import report
from lightning_eff.planner.schedules import SCHEDULES
from lightning_eff.planner.search import search
from lightning_eff.planner.simulation import StageTimes, peak_in_flight, simulate, simulate_long
from tests.planner.models import GPT, deep


@cache
def profile() -> ModuleProfile:
    return deep(GPT, 8, 512, precision_of("bf16-mixed"), 1024, 8)


def small(memory_gb: float) -> Accelerator:
    """An accelerator of which a plan can run out, two in a node."""
    return replace(find_accelerator("a100-80"), memory_bytes=memory_gb * 1e9, node_size=2)


@pytest.mark.parametrize(("gpus", "batch", "memory_gb"), [(1, 8, 80), (4, 8, 5), (8, 24, 2.5)])
def test_finds_what_trying_everything_finds(gpus: int, batch: int, memory_gb: float) -> None:
    accelerator = small(memory_gb)
    evaluator = Evaluator(profile(), accelerator, Assumptions())
    times: list[float] = []
    refused: Counter[str] = Counter()
    count = 0
    for layout in enumerate_layouts(profile(), gpus, accelerator.node_size, batch, refused):
        count += 1
        assert layout.gpus == gpus and layout.dp * layout.micro_batch * layout.num_microbatches == batch
        candidate, line = evaluator.run(layout)
        assert evaluator.bound(layout) <= candidate.seconds * (1 + 1e-9), layout
        assert candidate.seconds == pytest.approx(sum(candidate.parts.values())), layout
        assert candidate.seconds >= line.seconds
        if candidate.memory.total <= evaluator.limit:
            times.append(candidate.seconds)
    plan = search(profile(), accelerator, gpus, batch)
    assert plan.enumerated == count and plan.enumerated - plan.out_of_memory == len(times)
    apart = sorted({float(f"{seconds:.4g}") for seconds in times})
    assert [float(f"{c.seconds:.4g}") for c in plan.best] == apart[:10]
    assert gpus == 1 or (0 < len(times) < count and plan.simulated < len(times)), "the case tests nothing"


def test_layouts_that_tie_share_a_row() -> None:
    """ "sqrt" and some budgets of "optimal" recompute the same blocks: one row, with the least memory, lists the others."""
    shallow, h100 = replace(profile(), blocks=profile().blocks[:4]), find_accelerator("h100")
    plan = search(shallow, h100, 1, 4, only={"fp8": False, "bits": 32, "offload": False})
    shown = [f"{c.seconds:.4g}" for c in plan.best]
    assert len(set(shown)) == len(shown) == len(plan.ties) == 10
    evaluator = Evaluator(shallow, h100, Assumptions())
    larger = 0
    for best, ties in zip(plan.best, plan.ties, strict=True):
        for other in ties:
            assert f"{evaluator.run(other)[0].seconds:.4g}" == f"{best.seconds:.4g}" and other != best.layout
            assert evaluator.memory.of(other).total >= best.memory.total
            larger += evaluator.memory.of(other).total > best.memory.total
    assert larger, "the case tests nothing"
    assert [len(row["ties"]) for row in plan.record()["best"]] == [len(ties) for ties in plan.ties]
    row = next(i for i, ties in enumerate(plan.ties) if ties)
    lines = report(plan).splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:3] == ["dp", "tp", "pp"])
    assert lines[header].split()[-1] == "ties" and lines[header + 2 + row].split()[-1] == str(len(plan.ties[row]))


def test_nothing_fits() -> None:
    plan = search(profile(), small(0.1), 4, 8)
    assert not plan.best and plan.timeline is None and plan.out_of_memory == plan.enumerated > 0
    assert plan.smallest > 0.1e9


def test_what_is_ruled_out_is_counted() -> None:
    refused: Counter[str] = Counter()
    found = list(enumerate_layouts(profile(), 48, 8, 48, refused))
    assert {layout.tp for layout in found} == {1, 2, 4, 8}, "3 divides 48, but neither the heads nor the widths"
    assert {layout.pp for layout in found} <= {1, 2, 3, 4, 6, 8}
    assert refused["tensor parallelism: its size does not divide the heads or widths"]
    assert refused["pipeline: more stages than blocks"]
    assert not any(x.shard == "zero3" and x.pp > 1 and SCHEDULES[x.schedule].splits_backward for x in found)
    assert not list(enumerate_layouts(profile(), 11, 8, 8, refused))
    assert refused["the data-parallel size does not divide the global batch"]
    flat = replace(profile(), blocks=(), stack=None)
    assert {(x.tp, x.pp, x.remat) for x in enumerate_layouts(flat, 8, 8, 8, refused)} == {(1, 1, "none")}


def test_more_memory_and_faster_parts_never_slow_a_plan() -> None:
    base = find_accelerator("a100-40")
    seconds = search(profile(), base, 8, 16).best[0].seconds
    for change in (
        {"memory_bytes": base.memory_bytes * 2},
        {"matmul_flops": base.matmul_flops * 2},
        {"memory_bandwidth": base.memory_bandwidth * 2},
        {"node_bandwidth": base.node_bandwidth * 2},
    ):
        assert search(profile(), replace(base, **change), 8, 16).best[0].seconds <= seconds, change


def layout(**kwargs: object) -> Layout:
    plain = Layout(1, 1, 1, "none", "none", 1, 1, 1, "none")
    return replace(plain, **kwargs)  # pyright: ignore[reportArgumentType]


def test_states_are_counted_by_hand() -> None:
    """bf16-mixed with AdamW: 4 weights + 4 gradients + 8 state bytes a parameter, and what sharding leaves of them."""
    evaluator = Evaluator(profile(), find_accelerator("h200"), Assumptions())
    n, memory = profile().parameters, evaluator.memory
    plain = memory.of(layout())
    assert (plain.weights, plain.gathered, plain.gradients, plain.optimizer) == (4 * n, 0, 4 * n, 8 * n)
    # what is in no block comes together for the whole step, and two blocks beside it, in FP32 as they lie
    rest, block = profile().before.parameters + profile().after.parameters, profile().blocks[0].parameters
    whole = 2 * rest + 2 * block
    sharded = memory.of(layout(dp=4, shard="zero3"))
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (n, n, 2 * n)
    gone = profile().after.forward.at(1).saved_bytes + profile().blocks[0].forward.at(1).saved_bytes
    assert (sharded.gathered, sharded.unreduced) == (4 * whole, max(0, 4 * 2 * block - gone))
    groups = memory.of(layout(dp=8, shard="zero3", shards=2))
    assert (groups.weights, groups.gathered, groups.optimizer) == (2 * n, 4 * whole, 4 * n), (
        "pieces of two, four copies"
    )
    assert memory.of(layout(offload=True)).optimizer == 0
    tensor = memory.of(layout(tp=4))
    assert (tensor.weights, tensor.gradients, tensor.optimizer) == (n, n, 2 * n)
    # a pipeline's stage: the last step's gradients stay through the pass, and what was gathered stays gathered
    stage = memory.by_rank(layout(dp=2, pp=2, shard="zero3", schedule="1F1B", num_microbatches=4))[1]
    mine = evaluator.costs.parameters(1, 2)
    assert (stage.weights, stage.gradients, stage.optimizer) == (2 * mine, 4 * mine, 4 * mine)
    assert (stage.gathered, stage.unreduced) == (4 * (mine + block), 4 * mine), "a flat buffer of one block beside it"


def test_states_elsewhere_are_counted_by_hand() -> None:
    """As Megatron-LM and torchtitan have them: a 16-bit copy made once, and gathered in 16 bits."""
    evaluator = Evaluator(profile(), find_accelerator("h200"), Assumptions(pack=False))
    n = profile().parameters
    plain = evaluator.memory.of(layout())
    assert (plain.weights + plain.gathered, plain.gradients, plain.optimizer) == (6 * n, 4 * n, 8 * n)
    once = evaluator.memory.of(layout(dp=4, shard="zero2", num_microbatches=2))
    assert (once.weights + once.gathered, once.gradients + once.unreduced) == (n * (1 + 2), n * (1 + 4))
    largest = profile().before.parameters
    resharded = evaluator.memory.of(layout(dp=4, shard="zero3"))
    assert resharded.weights + resharded.gathered == n + 2 * 2 * largest
    assert resharded.gradients + resharded.unreduced == n + 4 * 2 * largest


def test_activations_are_counted_by_hand() -> None:
    """1F1B: the first of 4 ranks holds 4 micro-batches of its blocks, and 4 of its results, in FP32 as blocks hand them on."""
    evaluator = Evaluator(profile(), find_accelerator("h200"), Assumptions())
    costs, p = evaluator.costs, profile()
    at = layout(pp=4, schedule="1F1B", micro_batch=3, num_microbatches=8)
    block = p.blocks[0].forward.slope.saved_bytes * 3 + p.blocks[0].forward.fixed.saved_bytes
    casts = p.blocks[0].forward.fixed.saved_bytes
    assert casts == 2 * sum(s for s in (3 * 1024**2, 1024**2, 8 * 1024**2)), "16-bit copies of a block's matrices"
    assert p.stream == 2 * p.hidden_bytes == 512 * 1024 * 4
    first = p.before.forward.at(3).saved_bytes
    held = evaluator.memory._activations(at)
    assert held[0][0] == pytest.approx(4 * (len(costs.split(4)[0]) * block + first + 3 * p.stream))
    buffers = [8 * 3 * p.stream * k for k in (1, 4, 4, 3)]
    assert [rank[1] for rank in held] == buffers, (
        "a gradient from behind; what is received, its gradient and a stand-in"
    )
    full = evaluator.memory._activations(replace(at, remat="full"))
    assert full[1][0] == pytest.approx(3 * len(costs.split(4)[1]) * 3 * p.stream), (
        "the first one's input is in a buffer"
    )
    assert full[1][2] >= block, "one block's activations come back while it is run again"
    logits = 512 * 51200
    assert held[3][2] >= 3 * logits * 4, "the gradient of the logits, in 32 bits"


def test_tensor_parallelism_is_not_credited_with_what_stays_whole() -> None:
    """Hidden states, logits and the loss are on every rank; without pairs in the blocks everything is."""
    paired = replace(profile(), paired=True)
    memory = Evaluator(paired, find_accelerator("h200"), Assumptions()).memory
    alone = Evaluator(replace(paired, paired=False), find_accelerator("h200"), Assumptions()).memory
    line, casts = paired.blocks[0].forward.slope, paired.blocks[0].forward.fixed.saved_bytes
    one, four = layout(), layout(tp=4)
    outside = sum(part.forward.at(1).saved_bytes for part in (paired.before, paired.after))
    block = (line.saved_bytes - line.wide_saved_bytes) / 4 + line.wide_saved_bytes + casts / 4
    fixed = sum(part.forward.fixed.saved_bytes for part in (paired.before, paired.after))
    assert memory.of(four).activations == pytest.approx(8 * block + outside - fixed * 3 / 4)
    whole = memory.of(one).activations - (8 * casts + fixed) * 3 / 4
    assert alone.of(four).activations == pytest.approx(whole), "only the copies of weights are a quarter"
    assert memory.of(four).working >= 2 * 512 * 51200 * 4, "the logits' gradient and what it is of are whole"


def test_what_techniques_save_is_counted() -> None:
    memory = Evaluator(profile(), find_accelerator("h200"), Assumptions()).memory
    size = {
        remat: memory.of(layout(micro_batch=8, remat=remat)).activations
        for remat in ("none", "sqrt", "full", "selective")
    }
    assert size["full"] < size["sqrt"] < size["none"] and size["full"] < size["selective"] < size["none"]
    budgets = [memory.of(layout(micro_batch=8, remat="optimal", budget=b)).activations for b in (0.3, 0.5, 0.7, 0.9)]
    assert budgets == sorted(budgets) and size["full"] <= budgets[0] and budgets[-1] < size["none"]
    codes = [memory.of(layout(micro_batch=8, bits=bits)).activations for bits in (32, 8, 4)]
    assert codes == sorted(codes, reverse=True)
    grown = profile().blocks[0].forward.slope.saved_bytes * 8 * 8  # eight blocks of eight samples
    assert codes[0] - codes[1] == pytest.approx(grown * (1 - 8.25 / 16), rel=0.01)


def test_peaks_do_not_need_all_micro_batches() -> None:
    for name, schedule in SCHEDULES.items():
        for p, v, m in [(2, 2, 32), (4, 1, 40), (4, 2, 48), (4, 3, 64), (6, 2, 60)]:
            if not schedule.refusal(p, v, m):
                assert moments_of(name, p, v, m) == peak_in_flight(name, p, v, m), (name, p, v, m)


def test_long_steps_are_continued_from_their_steady_state() -> None:
    rng = random.Random(0)
    for name, schedule in SCHEDULES.items():
        for p, v, m in [(2, 2, 64), (4, 1, 101), (4, 2, 160), (8, 1, 200), (8, 2, 200)]:
            if schedule.refusal(p, v, m):
                continue
            times = [StageTimes(*(rng.uniform(0.8, 1.2) for _ in range(3))) for _ in range(p * v)]
            whole, short = simulate(name, p, v, m, times, 0.1), simulate_long(name, p, v, m, times, 0.1, most=0)
            assert short.seconds == pytest.approx(whole.seconds, rel=2e-3), (name, p, v, m)
            assert short.busy == pytest.approx(whole.busy), (name, p, v, m)


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_split_as_well_as_can_be(seed: int) -> None:
    """Against every way to cut."""
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    stages = rng.randint(1, n)
    weights = [rng.choice([1.0, 1.0, 2.0, 3.5]) for _ in range(n)]
    before, after = rng.choice([0.0, 0.5, 4.0]), rng.choice([0.0, 1.0, 3.0])

    def heaviest(cuts: list[range]) -> float:
        loads = [sum(weights[i] for i in cut) for cut in cuts]
        loads[0] += before
        loads[-1] += after
        return max(loads)

    got = split_blocks(weights, before, after, stages)
    assert [i for cut in got for i in cut] == list(range(n)) and all(len(cut) for cut in got)
    ways = (
        [range(a, b) for a, b in zip((0, *inner), (*inner, n), strict=True)]
        for inner in combinations(range(1, n), stages - 1)
    )
    assert heaviest(got) == pytest.approx(min(map(heaviest, ways)))


def test_the_table_is_sound() -> None:
    for name, a in ACCELERATORS.items():
        assert a.name == name and a.source and a.node_size >= 1
        assert 0.4 < a.matmul_flops / a.peak_flops < 1, "no matmul is faster than the datasheet"
        assert (a.fp8_peak_flops is None) == (a.fp8_matmul_flops is None)
        assert a.memory_bandwidth > a.node_bandwidth >= a.network_bandwidth
    with pytest.raises(ValueError, match=r"--gpu tpu: not in the table of accelerators. Pass one of[\s\S]*h200"):
        find_accelerator("tpu")


def test_bad_numbers_are_said() -> None:
    with pytest.raises(ValueError, match=r"plan\(gpus=0\): expected at least 1"):
        search(profile(), find_accelerator("h200"), 0, 8)
    with pytest.raises(ValueError, match=r"efficiency=1.5\): expected a fraction in \(0, 1\]"):
        Assumptions(efficiency=1.5)
    fp8 = replace(profile(), precision=precision_of("bf16-mixed", fp8=True))
    with pytest.raises(ValueError, match="it has no FP8"):
        search(fp8, find_accelerator("a100-80"), 8, 8)
