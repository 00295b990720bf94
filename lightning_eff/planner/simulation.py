"""Event simulation of a pipeline: every rank does its operations in order, each as soon as what it needs has arrived."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_eff.planner.schedules import SCHEDULES, Op


@dataclass(frozen=True)
class StageTimes:
    """How long one micro-batch takes in one stage, in seconds.

    Attributes:
        forward: a forward pass.
        backward_input: the backward pass down to the stage's input, with what is computed again for it.
        backward_weight: the backward pass for the weights; a full backward pass takes both.
    """

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: str) -> float:
        """The seconds of an operation of ``kind``."""
        if kind == "F":
            return self.forward
        if kind == "I":
            return self.backward_input
        return self.backward_weight if kind == "W" else self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Timeline:
    """A simulated step of the pipeline.

    Attributes:
        ops: for each rank its operations with start and end, in seconds.
        ends: when each rank is done.
        busy: seconds that each rank computes.
    """

    ops: list[list[tuple[Op, float, float]]]
    ends: list[float]
    busy: list[float]

    @property
    def seconds(self) -> float:
        """From the first operation's start to the last one's end."""
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


@lru_cache(maxsize=8)
def rank_lists(schedule: str, p: int, v: int, m: int) -> tuple[list[Op], ...]:
    """The operations of every rank; the last few are kept."""
    return tuple(SCHEDULES[schedule].ops(rank, p, v, m) for rank in range(p))


def simulate(schedule: str, p: int, v: int, m: int, times: Sequence[StageTimes], send_seconds: float) -> Timeline:
    """Run the schedule.

    Args:
        schedule: torch's name of it.
        p: ranks of the pipeline.
        v: stages on each rank.
        m: micro-batches.
        times: of each of the ``p * v`` stages.
        send_seconds: from the end of an operation to the arrival of its result on another rank; a rank goes on
            computing while it sends.

    Raises:
        ValueError: if the number of stages is another than that of ``times``.
        RuntimeError: if the ranks wait for one another, which a schedule of torch never makes them.
    """
    if len(times) != p * v:
        raise ValueError(f"simulate(p={p}, v={v}): got times of {len(times)} stages; expected p * v of them.")
    shape, last = SCHEDULES[schedule], p * v - 1
    ranks = [shape.rank_of(stage, p) for stage in range(p * v)]
    lists = rank_lists(schedule, p, v, m)
    seconds = {kind: [t.of(kind) for t in times] for kind in "FBIW"}
    forward: list[list[float]] = [[-1.0] * m for _ in range(p * v)]
    backward: list[list[float]] = [[-1.0] * m for _ in range(p * v)]
    done: list[list[tuple[Op, float, float]]] = [[] for _ in range(p)]
    clock, busy, at = [0.0] * p, [0.0] * p, [0] * p
    todo = list(range(p))
    while todo:
        moved: set[int] = set()
        for rank in todo:
            ops, i, now, out = lists[rank], at[rank], clock[rank], done[rank]
            while i < len(ops):
                op = ops[i]
                kind, stage, mb = op
                if kind == "F":
                    ready = 0.0 if stage == 0 else forward[stage - 1][mb]
                    other = stage and ranks[stage - 1] != rank
                elif kind == "W":
                    ready, other = backward[stage][mb], False
                elif stage == last:
                    ready, other = forward[stage][mb], False
                else:
                    ready = backward[stage + 1][mb]
                    other = ranks[stage + 1] != rank
                if ready < 0:
                    break
                start = max(now, ready + send_seconds if other else ready)
                taken = seconds[kind][stage]
                now = start + taken
                busy[rank] += taken
                if kind == "F":
                    forward[stage][mb] = now
                elif kind != "W":
                    backward[stage][mb] = now
                out.append((op, start, now))
                i += 1
            if i > at[rank]:
                moved.add(rank)
            at[rank], clock[rank] = i, now
        if not moved:
            raise RuntimeError(f"simulate({schedule!r}, p={p}, v={v}, m={m}): the ranks wait for one another.")
        todo = [rank for rank in todo if at[rank] < len(lists[rank])]
    return Timeline(done, clock, busy)


def simulate_long(
    schedule: str, p: int, v: int, m: int, times: Sequence[StageTimes], send_seconds: float, most: int = 150_000
) -> Timeline:
    """:func:`simulate`, but a step of more than ``most`` operations is continued from its steady state.

    Once a schedule has come into its period, ``p`` more micro-batches take the same time each time; so it is run with a few
    rounds of micro-batches and with one round more, and the difference is added for every round that is left. The
    operations of the shorter run are those returned; ``ends`` and ``busy`` are those of the whole step.
    """
    few = 8 * p + m % p
    uneven = SCHEDULES[schedule].interleaved and m % p  # then rounds are longer than p, and change with m
    if 2 * p * v * m <= most or m <= few or uneven:
        return simulate(schedule, p, v, m, times, send_seconds)
    short = simulate(schedule, p, v, few, times, send_seconds)
    longer = simulate(schedule, p, v, few + p, times, send_seconds)
    left = (m - few) // p

    def continued(a: list[float], b: list[float]) -> list[float]:
        return [x + left * (y - x) for x, y in zip(a, b, strict=True)]

    return Timeline(short.ops, continued(short.ends, longer.ends), continued(short.busy, longer.busy))


@lru_cache(maxsize=4096)
def peak_in_flight(schedule: str, p: int, v: int, m: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank the sets of micro-batches that its stages hold at once, largest first in every direction.

    Activations of a micro-batch are held from its forward pass to the end of its backward pass, that for the weights
    where it is split. A rank's entry is the list of those counts (one for each of its ``v`` stages, in order) which no
    other moment exceeds in all stages; what memory they take depends on the stages' bytes.
    """
    found: list[tuple[tuple[int, ...], ...]] = []
    for rank in range(p):
        ops = SCHEDULES[schedule].ops(rank, p, v, m)
        stages = sorted({op.stage for op in ops})
        where = {stage: i for i, stage in enumerate(stages)}
        held = [0] * len(stages)
        moments: set[tuple[int, ...]] = set()
        grew = False
        for kind, stage, _ in ops:
            if kind == "F":
                held[where[stage]] += 1
                grew = True
            elif kind != "I":
                if grew:
                    moments.add(tuple(held))
                held[where[stage]] -= 1
                grew = False
        found.append(_maximal(moments))
    return tuple(found)


def _maximal(moments: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    best: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, other, strict=True)) for other in best):
            best.append(moment)
    return tuple(best)
