"""The planner's schedules do what torch's do, and their bubbles are what the papers say."""

import pytest

from lightning_eff.planner.schedules import SCHEDULES
from lightning_eff.planner.simulation import StageTimes, peak_in_flight, simulate
from tests.planner.torch_schedules import torch_lists

SIZES = [(p, v, m) for p in (2, 3, 4, 8) for v in (1, 2, 3) for m in (2, 3, 4, 6, 8, 16, 17)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_order_of_operations_is_that_of_torch(name: str) -> None:
    shape, seen = SCHEDULES[name], 0
    for p, v, m in SIZES:
        if shape.refusal(p, v, m):
            continue
        seen += 1
        ours = [[tuple(op) for op in shape.ops(rank, p, v, m)] for rank in range(p)]
        assert ours == torch_lists(name, p, v, m, v_shaped=shape.v_shaped), (p, v, m)
    assert seen >= 10


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_refused_torch_refuses(name: str) -> None:
    shape, seen = SCHEDULES[name], 0
    for p, v, m in SIZES:
        stages_fit = v == 2 if shape.v_shaped else v == 1 or shape.interleaved
        if stages_fit and shape.refusal(p, v, m):
            seen += 1
            with pytest.raises(ValueError):
                torch_lists(name, p, v, m, v_shaped=shape.v_shaped)
    assert seen or name in ("GPipe", "LoopedBFS", "ZBVZeroBubble")


def bubble(name: str, p: int, v: int, m: int, forward: float = 1.0, split: tuple[float, float] = (1.0, 1.0)) -> float:
    return simulate(name, p, v, m, [StageTimes(forward / v, split[0] / v, split[1] / v)] * (p * v), 0.0).bubble


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 32), (64, 512)])
def test_bubble_of_gpipe_and_1f1b(p: int, m: int) -> None:
    """(p - 1) / (m + p - 1), whatever the backward pass costs."""
    for name in ("GPipe", "1F1B"):
        assert bubble(name, p, 1, m) == pytest.approx((p - 1) / (m + p - 1), rel=1e-9)
        assert bubble(name, p, 1, m, 1.0, (0.7, 2.1)) == pytest.approx((p - 1) / (m + p - 1), rel=1e-9)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 32), (64, 2, 512)])
def test_bubble_of_interleaving(p: int, v: int, m: int) -> None:
    """(p - 1) / (m v + p - 1), of Interleaved1F1B and of breadth-first alike."""
    for name in ("Interleaved1F1B", "LoopedBFS"):
        assert bubble(name, p, v, m) == pytest.approx((p - 1) / (m * v + p - 1), rel=1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (8, 40)])
def test_bubble_of_zero_bubble(p: int, m: int) -> None:
    """Between a rank's first operation and its last: none for ZBV where all passes are equal, else as the paper says.

    Its table 1 has (p - 1)(f + i - w) for ZB-H1, which torch's InterleavedZeroBubble is with one stage a rank.
    """
    for name, v, times in (
        ("ZBVZeroBubble", 2, StageTimes(1.0, 1.0, 1.0)),
        ("InterleavedZeroBubble", 1, StageTimes(1.0, 1.2, 0.8)),
    ):
        line = simulate(name, p, v, m, [times] * (p * v), 0.0)
        waits = [ops[-1][2] - ops[0][1] - busy for ops, busy in zip(line.ops, line.busy, strict=True)]
        expected = 0.0 if v == 2 else (p - 1) * (1.0 + 1.2 - 0.8)
        assert max(waits) == pytest.approx(expected, abs=1e-9), name


def test_sending_delays_each_hop() -> None:
    """One micro-batch goes down and up through p stages: 2 (p - 1) sends, none of them hidden."""
    p, send = 4, 0.25
    line = simulate("GPipe", p, 1, 1, [StageTimes(1.0, 1.0, 1.0)] * p, send)
    assert line.seconds == pytest.approx(p * 3 + 2 * (p - 1) * send)
    turn = simulate("ZBVZeroBubble", p, 2, 1, [StageTimes(1.0, 1.0, 1.0)] * (2 * p), send)
    # 2 p stages down and back, and the weight passes of the middle stage (on the way) and of the first one
    assert turn.ops[0][-1][2] == pytest.approx(4 * p + 2 + 4 * (p - 1) * send), "the turn of the V is on one rank"


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 8)])
def test_micro_batches_in_flight(p: int, m: int) -> None:
    """GPipe holds all m, 1F1B p - rank (Narayanan et al. 2021, section 2.2.1), interleaving what section 2.2.2 says."""
    assert peak_in_flight("GPipe", p, 1, m) == (((m,),),) * p
    assert peak_in_flight("1F1B", p, 1, m) == tuple(((min(m, p - rank),),) for rank in range(p))
    v = 2
    for rank, moments in enumerate(peak_in_flight("Interleaved1F1B", p, v, m)):
        assert max(map(sum, moments)) == min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v)
    for moments in peak_in_flight("ZBVZeroBubble", p, 2, max(m, 2 * p)):
        assert max(map(sum, moments)) <= 2 * p, "no more than 1F1B's worst rank, in halves"


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_are_held_until_the_weights_are_done(name: str) -> None:
    """The peaks against a set of what is held: in at the forward pass, out at the last pass that needs it."""
    shape = SCHEDULES[name]
    for p, v, m in [(2, 2, 8), (4, 1, 8), (4, 2, 16), (4, 3, 12)]:
        if shape.refusal(p, v, m):
            continue
        for rank, moments in enumerate(peak_in_flight(name, p, v, m)):
            held: set[tuple[int, int]] = set()
            most = 0
            for kind, stage, microbatch in shape.ops(rank, p, v, m):
                if kind == "F":
                    held.add((stage, microbatch))
                elif kind in "BW":
                    held.remove((stage, microbatch))
                most = max(most, len(held))
            assert not held and most == max(map(sum, moments)), (p, v, m, rank)


def test_wrong_sizes_are_said() -> None:
    with pytest.raises(ValueError, match="1F1B needs as many micro-batches as stages"):
        SCHEDULES["1F1B"].ops(0, 4, 1, 3)
    with pytest.raises(ValueError, match="got times of 3 stages"):
        simulate("1F1B", 4, 1, 4, [StageTimes(1, 1, 1)] * 3, 0.0)
