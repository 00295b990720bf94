"""Event simulation of a pipeline: every rank runs its operations in order, each as soon as its inputs arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_eff.planner.schedules import SCHEDULES, Op


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in one stage.

    Attributes:
        forward: the forward pass.
        backward_input: the backward pass for the stage's input, including recomputation.
        backward_weight: the backward pass for the weights. A full backward pass takes both.
    """

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: str) -> float:
        """Return the seconds of an operation of ``kind``."""
        if kind == "F":
            return self.forward
        if kind == "I":
            return self.backward_input
        return self.backward_weight if kind == "W" else self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Timeline:
    """A simulated step of the pipeline.

    Attributes:
        ops: each rank's operations with start and end, in seconds.
        ends: end of each rank's last operation, in seconds.
        busy: seconds of computation per rank.
    """

    ops: list[list[tuple[Op, float, float]]]
    ends: list[float]
    busy: list[float]

    @property
    def seconds(self) -> float:
        """The time from the first operation's start to the last one's end."""
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """The fraction of time that ranks wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


@lru_cache(maxsize=8)
def rank_lists(schedule: str, p: int, v: int, m: int) -> tuple[list[Op], ...]:
    """Return the operations of every rank."""
    return tuple(SCHEDULES[schedule].ops(rank, p, v, m) for rank in range(p))


def simulate(schedule: str, p: int, v: int, m: int, times: Sequence[StageTimes], send_seconds: float) -> Timeline:
    """Simulate a step of the schedule.

    Args:
        schedule: torch's name of the schedule.
        p: ranks of the pipeline.
        v: stages on each rank.
        m: micro-batches.
        times: times of each of the ``p * v`` stages.
        send_seconds: time until a result arrives on another rank. The sender continues to compute.

    Raises:
        ValueError: if ``times`` does not have ``p * v`` entries.
        RuntimeError: if the ranks wait for each other, which none of torch's schedules causes.
    """
    if len(times) != p * v:
        raise ValueError(f"simulate(p={p}, v={v}): got times of {len(times)} stages. Pass the times of p * v stages.")
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
            raise RuntimeError(f"simulate({schedule!r}, p={p}, v={v}, m={m}): the ranks wait for each other.")
        todo = [rank for rank in todo if at[rank] < len(lists[rank])]
    return Timeline(done, clock, busy)


def simulate_long(
    schedule: str, p: int, v: int, m: int, times: Sequence[StageTimes], send_seconds: float, most: int = 150_000
) -> Timeline:
    """Simulate like :func:`simulate`, but extrapolate a step of more than ``most`` operations from its steady state.

    In the steady state every ``p`` more micro-batches take the same time. The function simulates a few such rounds, and
    then one round more. It adds the difference for each remaining round. ``ops`` are those of the shorter simulation;
    ``ends`` and ``busy`` are those of the whole step.
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
    """Return, for each rank, the largest numbers of micro-batches that its stages hold at once.

    A stage holds a micro-batch's activations from its forward pass to the end of its backward pass (the weight pass, if
    the schedule splits it). A moment is one count for each of the rank's ``v`` stages. The result has the moments that no
    other moment exceeds in all stages. Which of them needs the most memory depends on the stages' bytes.
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
