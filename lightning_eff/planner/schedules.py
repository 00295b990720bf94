"""The pipeline schedules of ``torch.distributed.pipelining``, as lists of each rank's operations.

They are functions that return plain tuples, so that the planner can simulate hundreds without processes. A test compares
them, operation by operation, with torch's schedules.

References:
    GPipe: Huang et al. 2019, arXiv:1811.06965.

    1F1B and interleaving: Narayanan et al. 2021, arXiv:2104.04473.

    LoopedBFS: Lamy-Poirier 2023, arXiv:2211.05953.

    Zero bubble and its V shape: Qi et al. 2024, arXiv:2401.10241.

    DualPipeV: DeepSeek-AI 2024, arXiv:2412.19437.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Op(NamedTuple):
    """One operation of a rank.

    Attributes:
        kind: "F" forward, "B" backward, "I" backward for the input only, "W" backward for the weights only.
        stage: index of the stage.
        microbatch: index of the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
        name: torch's name, as ``get_schedule_class`` accepts it.
        interleaved: several stages on each rank.
        v_shaped: exactly two stages on each rank; the last rank has stages ``p - 1`` and ``p``.
        splits_backward: has "I" and "W" operations.
    """

    name: str
    interleaved: bool = False
    v_shaped: bool = False
    splits_backward: bool = False

    def refusal(self, p: int, v: int, m: int) -> str | None:
        """Return why torch refuses ``p`` ranks of ``v`` stages and ``m`` micro-batches, or None if it accepts them."""
        if self.v_shaped and v != 2:
            return f"{self.name} needs exactly 2 stages per rank"
        if not self.interleaved and not self.v_shaped and v != 1:
            return f"{self.name} needs exactly 1 stage per rank"
        if self.name == "1F1B" and m < p:
            return "1F1B needs as many micro-batches as stages"
        if self.name == "DualPipeV" and m < 2 * p:
            return "DualPipeV needs as many micro-batches as stages"
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble") and m % max(1, m // p):
            return f"{self.name} needs a number of micro-batches that divides into equal rounds"
        return None

    def rank_of(self, stage: int, p: int) -> int:
        """Return the rank that has ``stage``."""
        return min(stage, 2 * p - 1 - stage) if self.v_shaped else stage % p

    def ops(self, rank: int, p: int, v: int, m: int) -> list[Op]:
        """Return the operations of ``rank`` in a step of ``m`` micro-batches, for ``p`` ranks of ``v`` stages each.

        Raises:
            ValueError: if torch refuses these sizes.
        """
        refusal = self.refusal(p, v, m)
        if refusal:
            raise ValueError(f"Schedule(p={p}, v={v}, m={m}): {refusal}. Choose other sizes.")
        return [Op(*op) for op in _GENERATORS[self.name](rank, p, v, m)]


Raw = list[tuple[str, int, int]]


def _gpipe(rank: int, p: int, v: int, m: int) -> Raw:
    return [("F", rank, i) for i in range(m)] + [("B", rank, i) for i in range(m)]


def _one_f_one_b(rank: int, p: int, v: int, m: int) -> Raw:
    ahead = p - 1 - rank
    ops: Raw = [("F", rank, i) for i in range(ahead)]
    for i in range(m - ahead):
        ops += [("F", rank, ahead + i), ("B", rank, i)]
    return ops + [("B", rank, i) for i in range(m - ahead, m)]


def _looped_bfs(rank: int, p: int, v: int, m: int) -> Raw:
    stages = range(rank, p * v, p)
    forward: Raw = [("F", stage, i) for stage in stages for i in range(m)]
    return forward + [("B", stage, i) for stage in reversed(stages) for i in reversed(range(m))]


def _rounds(rank: int, p: int, v: int, m: int, hop: int, on_forward: Callable[[int], object], back: str) -> list[int]:
    """Walk an interleaved schedule and return the order of its stages' backward passes.

    A group of ``m / (m // p)`` micro-batches passes through one stage, then through the next. ``on_forward`` gets the stage
    for each forward pass, and ``-1 - stage`` for each backward pass.
    """
    group = m // max(1, m // p)
    warm_up = min((v - 1) * group + hop * (p - 1 - rank), m * v)
    order: list[int] = []
    for step in range(m * v + warm_up):
        if step < m * v:
            on_forward((step // group) % v * p + rank)
        if step >= warm_up:
            stage = (v - 1 - (step - warm_up) // group % v) * p + rank
            order.append(stage)
            on_forward(-1 - stage)
    return order


def _interleaved(rank: int, p: int, v: int, m: int) -> Raw:
    ops: Raw = []
    seen: dict[tuple[str, int], int] = defaultdict(int)

    def add(stage: int) -> None:
        kind, stage = ("F", stage) if stage >= 0 else ("B", -1 - stage)
        ops.append((kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1

    _rounds(rank, p, v, m, 2, add, "B")
    return ops


def _interleaved_zero_bubble(rank: int, p: int, v: int, m: int) -> Raw:
    """Delay the rank's first ``rank`` weight passes, and run them while the pipeline drains."""
    ops: Raw = []
    seen: dict[tuple[str, int], int] = defaultdict(int)
    owed: list[int] = []
    step = 0

    def put(kind: str, stage: int) -> None:
        ops.append((kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1

    def add(stage: int) -> None:
        nonlocal step
        if stage >= 0:
            put("F", stage)
            return
        put("I", -1 - stage)
        owed.append(-1 - stage)
        if step >= rank:
            put("W", owed.pop(0))
        step += 1

    _rounds(rank, p, v, m, 1, add, "I")
    for stage in owed:
        put("W", stage)
    return ops


class _Rank:
    """Appends operations, and numbers the micro-batches of each kind and stage."""

    def __init__(self, rank: int, p: int) -> None:
        self.down, self.up = rank, 2 * p - 1 - rank
        self.ops: Raw = []
        self.seen: dict[tuple[str, int], int] = defaultdict(int)

    def add(self, kinds: str, stage: int) -> None:
        for kind in kinds:
            self.ops.append((kind, stage, self.seen[kind, stage]))
            self.seen[kind, stage] += 1


def _zbv(rank: int, p: int, v: int, m: int) -> Raw:
    """Return the operations of ZBV, which has no bubble if forward, input and weight passes take equal time."""
    filled = max(2 * p - 1, m)  # the pattern needs at least 2p - 1; those beyond m are dropped at the end
    r = _Rank(rank, p)
    for _ in range(2 * (p - rank) - 1):
        r.add("F", r.down)
    for _ in range(rank):
        r.add("F", r.up)
        r.add("F", r.down)
    for _ in range(p - rank):
        r.add("FIW", r.up)
    while r.seen["F", r.up] < r.seen["F", r.down] or r.seen["F", r.down] < filled:
        if r.seen["F", r.down] < filled:
            r.add("F", r.down)
        r.add("IW", r.down)
        r.add("FIW", r.up)
    for _ in range(rank):
        r.add("I", r.down)
        r.add("I", r.up)
    for _ in range(p - rank):
        r.add("I", r.down)
        r.add("W", r.down)
    for stage in (r.up, r.down):
        while r.seen["W", stage] < r.seen["I", stage]:
            r.add("W", stage)
    return [op for op in r.ops if op[2] < m]


class _Dual(_Rank):
    """A rank of DualPipeV, which can delay weight passes."""

    def __init__(self, rank: int, p: int) -> None:
        super().__init__(rank, p)
        self.owed: list[tuple[int, int]] = []

    def backward(self, stage: int, *, split: bool) -> None:
        """Append a backward pass of the next micro-batch; if ``split``, delay its weight pass."""
        microbatch = self.seen["I", stage]
        self.seen["I", stage] += 1
        self.ops.append(("I" if split else "B", stage, microbatch))
        if split:
            self.owed.append((stage, microbatch))

    def weights(self) -> None:
        """Append the oldest delayed weight pass, if there is one."""
        if self.owed:
            stage, microbatch = self.owed.pop(0)
            self.ops.append(("W", stage, microbatch))


def _dual_pipe_v(rank: int, p: int, v: int, m: int) -> Raw:
    """Return the operations of DualPipeV; passes that torch overlaps follow each other."""
    r = _Dual(rank, p)
    behind = p - rank - 1
    for _ in range(2 * behind):
        r.add("F", r.down)
    for _ in range(rank + 1):
        r.add("F", r.down)
        r.add("F", r.up)
    for _ in range(behind):
        r.backward(r.up, split=True)
        r.weights()
        r.add("F", r.up)
    for _ in range(m - 2 * p + rank + 1):
        r.add("F", r.down)
        r.backward(r.up, split=False)
        r.add("F", r.up)
        r.backward(r.down, split=False)
    for _ in range(behind):
        r.backward(r.up, split=False)
        r.add("F", r.up)
        r.backward(r.down, split=False)
    half = (rank + 1) // 2
    split = False
    for i in range(rank + 1):
        split |= i == half and rank % 2 == 1
        r.backward(r.up, split=split)
        split |= i == half and rank % 2 == 0
        r.backward(r.down, split=split)
    for _ in range(behind):
        r.weights()
        r.backward(r.down, split=split)
    for _ in range(rank + 1):
        r.weights()
    return r.ops


_GENERATORS: dict[str, Callable[[int, int, int, int], Raw]] = {
    "GPipe": _gpipe,
    "1F1B": _one_f_one_b,
    "LoopedBFS": _looped_bfs,
    "Interleaved1F1B": _interleaved,
    "InterleavedZeroBubble": _interleaved_zero_bubble,
    "ZBVZeroBubble": _zbv,
    "DualPipeV": _dual_pipe_v,
}

#: All schedules by torch's name.
SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        Schedule("GPipe"),
        Schedule("1F1B"),
        Schedule("LoopedBFS", interleaved=True),
        Schedule("Interleaved1F1B", interleaved=True),
        Schedule("InterleavedZeroBubble", interleaved=True, splits_backward=True),
        Schedule("ZBVZeroBubble", v_shaped=True, splits_backward=True),
        Schedule("DualPipeV", v_shaped=True, splits_backward=True),
    )
}
