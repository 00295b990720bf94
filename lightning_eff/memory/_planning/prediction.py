"""Predict a plan's schedule, run by run, with the bytes held and the seconds taken.

First, a ledger of names and sizes gives what is held at each run if copies to the host took no time. Then a clock adds how
long copies hold more than that, and where a run must wait for them. Nothing here depends on how plans are found.
"""

from dataclasses import dataclass
from math import inf
from typing import Protocol

from lightning_eff.memory._planning.chain import Event, Item, Keep, Kind, Segment, Stage, boundaries, span


class Laid(Protocol):
    """The contents of a plan, as documented in ``Plan``."""

    @property
    def stages(self) -> tuple[Stage, ...]: ...

    @property
    def items(self) -> tuple[Item, ...]: ...

    @property
    def budget_bytes(self) -> int | None: ...

    @property
    def bandwidth_bytes_per_second(self) -> float: ...


@dataclass
class _Run:
    """One run of a block: the bytes held during and after it; ``moved`` bytes go to the host after it, or return before it."""

    kind: Kind
    block: int
    seconds: float
    held: int
    after: int = 0
    moved: int = 0


class _Ledger:
    """Executes a plan on names and sizes; ``runs`` lists every run in order, with the bytes held."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self.x = boundaries(stages)
        self.held: dict[tuple[str, int], int] = {}
        self.total = 0
        self.runs: list[_Run] = []

    def hold(self, what: str, index: int) -> None:
        stage = self.stages[index] if what == "interior" else None
        size = self.x[index] if stage is None else stage.saved_bytes - stage.output_bytes
        self.total += size - self.held.get((what, index), 0)
        self.held[what, index] = size

    def drop(self, what: str, index: int) -> None:
        self.total -= self.held.pop((what, index), 0)
        self.runs[-1].after = self.total

    def run(self, kind: Kind, block: int) -> None:
        stage = self.stages[block]
        backward = kind == "backward"
        extra = stage.backward_peak_bytes if backward else stage.forward_peak_bytes
        seconds = stage.backward_seconds if backward else stage.forward_seconds
        self.runs.append(_Run(kind, block, seconds, self.total + extra, self.total))

    def forward(self, items: tuple[Item, ...], kind: Kind) -> None:
        for item in items:
            start, end = span(item)
            for block in range(start, end):
                self.hold("x", block + 1)
                if isinstance(item, Keep):
                    self.hold("interior", block)
                self.run(kind, block)
                if kind == "again" and item is items[-1] and isinstance(item, Keep):
                    self.runs[-1].seconds = self.stages[block].last_seconds
                if block > start:
                    self.drop("x", block)
                elif item.offload:
                    self.runs[-1].moved = self._size(item)
                    self.drop("interior", start)
                    self.drop("x", start)

    def backward(self, items: tuple[Item, ...]) -> None:
        for place in reversed(range(len(items))):
            item, first = items[place], len(self.runs)
            start, end = span(item)
            self.hold("x", start)
            if isinstance(item, Keep):
                self.hold("x", end)
                self.hold("interior", start)
                self.hold("gradient", start)
                self.run("backward", start)
                for what, index in (("x", end), ("interior", start), ("gradient", end)):
                    self.drop(what, index)
            else:
                self.forward(item.inner, "again")
                if isinstance(item.inner[-1], Segment):
                    self.drop("x", end)  # the last output is not needed a second time
                self.backward(item.inner)
            if item.offload:
                self.runs[first].moved = self._size(item)
            if place > 0 and (isinstance(items[place - 1], Segment) or items[place - 1].offload):
                self.drop("x", start)  # otherwise it is the saved output of the stored block before

    def _size(self, item: Item) -> int:
        start, _ = span(item)
        stage = self.stages[start]
        return self.x[start] + (stage.saved_bytes - stage.output_bytes if isinstance(item, Keep) else 0)


def _operations(plan: Laid) -> list[_Run]:
    ledger, n = _Ledger(plan.stages), len(plan.stages)
    ledger.hold("x", 0)
    ledger.forward(plan.items, "forward")
    if isinstance(plan.items[-1], Segment) or plan.items[-1].offload:
        ledger.drop("x", n)
    ledger.hold("gradient", n)
    ledger.backward(plan.items)
    return ledger.runs


def schedule(plan: Laid) -> tuple[Event, ...]:
    """Return the timed schedule.

    Copies take turns at the bandwidth, in parallel with the computation, and bytes leave and enter the device as they are
    copied. A first forward run waits until the remaining unsent bytes leave room for it. The backward pass is the same,
    read from its end: an item (all runs of a Segment together) leaves room for the bytes of earlier items that are already
    back, and they return as late as this allows. At the turn, everything has left; then what the first items of the
    backward pass need returns.
    """
    runs = _operations(plan)
    limit = inf if plan.budget_bytes is None else plan.budget_bytes
    rate = plan.bandwidth_bytes_per_second
    events: list[Event] = []
    clock, turn = 0.0, sum(run.kind == "forward" for run in runs)

    def add(kind: Kind, block: int, seconds: float, held: float, copying: float) -> None:
        nonlocal clock
        if kind != "wait" or seconds > 0:
            events.append(Event(kind, block, clock, clock + seconds, round(held + copying), round(copying)))
            clock += seconds

    queue, after = 0.0, 0
    for run in runs[:turn]:
        queue_before, queue = queue, min(queue, max(limit - run.held, 0))
        add("wait", -1, (queue_before - queue) / rate if rate else 0.0, after, queue_before)
        add(run.kind, run.block, run.seconds, run.held, queue)
        queue, after = max(queue - rate * run.seconds, 0.0) + run.moved, run.after
    add("wait", -1, queue / rate if rate else 0.0, after, queue)

    groups: list[list[_Run]] = [[] for _ in plan.items]
    place = {block: k for k, item in enumerate(plan.items) for block in range(*span(item))}
    for run in runs[turn:]:
        groups[place[run.block]].append(run)
    queue, beside = 0.0, []
    for group in groups:
        queue_before, queue = queue, min(queue, max(limit - max(run.held for run in group), 0))
        beside.append((queue, queue_before))
        queue = max(queue - rate * sum(run.seconds for run in group), 0.0) + sum(run.moved for run in group)
    add("wait", -1, queue / rate if rate else 0.0, after, queue)
    for group, (queue, queue_after) in zip(reversed(groups), reversed(beside), strict=True):
        for run in group:
            add(run.kind, run.block, run.seconds, run.held, queue)
        add("wait", -1, (queue_after - queue) / rate if rate else 0.0, group[-1].after, queue_after)
    return tuple(events)


def offloaded_bytes(plan: Laid) -> int:
    """Return the bytes that move to the host in a forward pass."""
    return sum(run.moved for run in _operations(plan) if run.kind == "forward")


def room(plan: Laid, events: tuple[Event, ...], item: int) -> tuple[int | None, int]:
    """See ``Plan.room``; ``events`` are the plan's :func:`schedule`."""
    start, end = span(plan.items[item])
    first = next(run for run in _operations(plan) if run.block == start)
    unsent = None if plan.budget_bytes is None else max(plan.budget_bytes - first.held, 0)
    backward = next(event for event in events if event.kind == "backward" and start <= event.block < end)
    return unsent, backward.copying_bytes
