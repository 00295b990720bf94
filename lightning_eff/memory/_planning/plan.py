"""A plan of what a chain of blocks keeps between forward and backward, and what is predicted of it.

The chain is the one of Herrmann et al. 2019 (HAL-02352969): block ``i`` turns the tensor ``x_i`` into ``x_{i+1}``, and its
backward pass turns the gradient of ``x_{i+1}`` into that of ``x_i``, with what the block has saved and with ``x_i``. Counted
in a peak are, at each moment: the inputs and saved tensors that are kept, the tensor and the gradient that travel along the
chain, and what the block that runs needs beyond them. The input of the first block is counted, and the output of the last;
what is outside the chain (embeddings, head, loss, parameters) is not.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import isfinite, isqrt
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """One block of the chain, as profiled.

    Args:
        name: what the user is told of it, such as ``"h.3"``.
        forward_seconds: of one forward pass, >= 0.
        backward_seconds: of its backward pass, without any recomputation, >= 0.
        input_bytes: of the block's input, from which recomputation starts.
        saved_bytes: all that autograd keeps of the block when nothing is recomputed; its output included, its input not.
        output_bytes: of the block's output; at most ``saved_bytes``.
        forward_peak_bytes: what a forward pass takes at its peak beyond its input, and beyond what it leaves: its output,
            or, in a pass that saves, ``saved_bytes``.
        backward_peak_bytes: what the backward pass takes at its peak beyond ``saved_bytes``, the block's input and the
            gradients of output and input.
        again_seconds: of a forward pass that ends when the last tensor is saved, as that of the last block of a Segment
            does; at most ``forward_seconds``, which None stands for.

    Raises:
        ValueError: a number is negative, not finite, or one is larger than it may be.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    input_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    again_seconds: float | None = None

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and value is not None and not (value >= 0 and isfinite(value)):
                raise ValueError(
                    f"Stage {self.name!r}: got {field}={value!r}; expected a finite number >= 0. Profile the block again."
                )
        if self.output_bytes > self.saved_bytes:
            raise ValueError(
                f"Stage {self.name!r}: got output_bytes={self.output_bytes} and saved_bytes={self.saved_bytes}; expected"
                " output_bytes <= saved_bytes, because what is saved includes the output. Add the output to it."
            )
        if self.last_seconds > self.forward_seconds:
            raise ValueError(
                f"Stage {self.name!r}: got again_seconds={self.again_seconds} and forward_seconds={self.forward_seconds};"
                " expected again_seconds <= forward_seconds, because it is a part of it. Leave it out."
            )

    @property
    def last_seconds(self) -> float:
        """Of the forward pass in which the last block of a Segment runs again and is kept."""
        return self.forward_seconds if self.again_seconds is None else self.again_seconds


class Action(Enum):
    """What becomes of a block's saved tensors between its forward and its backward pass."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"
    OFFLOAD = "moved to host memory"


@dataclass(frozen=True)
class Keep:
    """Block ``index`` runs once; what autograd saves of it stays, or, with ``offload``, goes to the host and comes back.

    It is the block's interior (what it saves, less its output) and its input that go to the host.
    """

    index: int
    offload: bool = False


@dataclass(frozen=True)
class Segment:
    """Blocks ``start`` to ``end - 1`` run without saving; their input is kept, or, with ``offload``, goes to the host.

    In the backward pass, when the first of their saved tensors is needed, they run again following ``inner``, a plan for
    exactly these blocks: Segments in it run again without saving, what its Keeps save is held. Where the last block is a
    Keep, it runs no further than to the last tensor that it saves.
    """

    start: int
    end: int
    inner: tuple["Item", ...]
    offload: bool = False


Item = Keep | Segment
Kind = Literal["forward", "again", "backward", "wait"]


@dataclass(frozen=True)
class Event:
    """One step of the schedule that is predicted.

    ``kind`` is a first ``"forward"`` run, a run ``"again"`` in the backward pass, a ``"backward"`` run, or a ``"wait"`` for
    copies, of which ``block`` is -1. ``held_bytes``: the most that is on the device while it lasts; ``copying_bytes`` of it are
    in copies: not gone yet or, in the backward pass, back already for blocks whose turn has not come.
    """

    kind: Kind
    block: int
    start_seconds: float
    end_seconds: float
    held_bytes: int
    copying_bytes: int


@dataclass(frozen=True)
class Plan:
    """What is done with each block of a chain.

    Args:
        stages: the chain.
        items: Keeps and Segments that cover each block once, in forward order; what is inside Segments is not offloaded.
        budget_bytes: what the plan was made for; None for a plan without one.
        bandwidth_bytes_per_second: of copies to the host and of copies back, each; needed where something is offloaded.

    Raises:
        ValueError: the items do not cover the blocks so, or something is offloaded without a bandwidth.
    """

    stages: tuple[Stage, ...]
    items: tuple[Item, ...]
    budget_bytes: int | None = None
    bandwidth_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("Plan: got no stages; expected one at least. Name the stack of blocks.")
        _check_cover(self.items, 0, len(self.stages), top=True)
        if any(item.offload for item in self.items) and not self.bandwidth_bytes_per_second > 0:
            raise ValueError(
                f"Plan: got offloaded items and bandwidth_bytes_per_second={self.bandwidth_bytes_per_second}; expected a"
                " bandwidth > 0. Measure the copies, or offload nothing."
            )

    @cached_property
    def forward_calls(self) -> tuple[int, ...]:
        """How often each block's forward runs in a forward and backward pass: 1, and once for each Segment around it."""
        calls: list[int] = []

        def count(items: tuple[Item, ...], depth: int) -> None:
            for item in items:
                if isinstance(item, Keep):
                    calls.append(depth)
                else:
                    count(item.inner, depth + 1)

        count(self.items, 1)
        return tuple(calls)

    @property
    def total_forward_calls(self) -> int:
        """The sum of ``forward_calls``."""
        return sum(self.forward_calls)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """What becomes of each block; a block of a Segment is RECOMPUTE, also where the Segment's input is offloaded."""
        actions: list[Action] = []
        for item in self.items:
            if isinstance(item, Keep):
                actions.append(Action.OFFLOAD if item.offload else Action.KEEP)
            else:
                actions += [Action.RECOMPUTE] * (item.end - item.start)
        return tuple(actions)

    @cached_property
    def offloaded_bytes(self) -> int:
        """The bytes that go to the host in a forward pass, and come back in the backward pass."""
        from lightning_eff.memory._planning import prediction

        return prediction.offloaded_bytes(self)

    @cached_property
    def schedule(self) -> tuple[Event, ...]:
        """The whole schedule, event by event."""
        from lightning_eff.memory._planning import prediction

        return prediction.schedule(self)

    def room(self, item: int) -> tuple[int | None, int]:
        """How far copies may lag behind, and run ahead, at one of ``items``, for what runs the plan to hold to.

        Returns:
            unsent: when the item's first block begins its first forward run, at most so many bytes of the offloaded items
                before it may be on the device still; wait until it is so. None: any number, the plan has no budget.
            returned: while the item is in its backward pass (all of it, for a Segment), so many bytes of the offloaded
                items before it, the last of them first, are brought back beside it, and no more.
        """
        from lightning_eff.memory._planning import prediction

        return prediction.room(self, item)

    @property
    def peak_bytes(self) -> int:
        """The most that the chain holds at any moment."""
        return max(event.held_bytes for event in self.schedule)

    @property
    def seconds(self) -> float:
        """Of one forward and backward pass through the chain, recomputation and waiting for copies included."""
        return self.schedule[-1].end_seconds

    def table(self) -> str:
        """The plan as lines of text."""
        from lightning_eff.memory._planning import view

        return view.table(self)

    def __str__(self) -> str:
        return self.table()

    def draw(self, path: str | Path) -> None:
        """Draw what happens to each block, and the bytes held over the schedule against the budget.

        Args:
            path: of the picture; its ending says the format: .png, .svg, .pdf.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from lightning_eff.memory._planning import view

        view.draw(self, path)


def keep_all(stages: tuple[Stage, ...]) -> Plan:
    """Nothing is recomputed: plain training."""
    return Plan(stages, tuple(Keep(i) for i in range(len(stages))))


def full(stages: tuple[Stage, ...]) -> Plan:
    """Each block is recomputed from its own input; the last one, too."""
    return Plan(stages, tuple(recomputed(i, i + 1) for i in range(len(stages))))


def sqrt(stages: tuple[Stage, ...]) -> Plan:
    """``round(sqrt(n))`` segments of nearly equal length (Chen et al. 2016, arXiv:1604.06174, section 4.1).

    The last segment is kept: it would be recomputed at once, with everything it saves in memory again.
    """
    n = len(stages)
    root = isqrt(n)
    return segments(stages, root + (n > root * (root + 1)))


def segments(stages: tuple[Stage, ...], count: int) -> Plan:
    """``count`` segments of nearly equal length, in [1, n]; each but the last is recomputed once, the last is kept."""
    bounds = [len(stages) * k // count for k in range(count + 1)]
    items: list[Item] = [recomputed(start, end) for start, end in pairwise(bounds[:-1])]
    return Plan(stages, (*items, *(Keep(i) for i in range(bounds[-2], len(stages)))))


def recomputed(start: int, end: int) -> Segment:
    """Blocks ``start`` to ``end - 1``, recomputed once and all together."""
    return Segment(start, end, tuple(Keep(i) for i in range(start, end)))


def boundaries(stages: tuple[Stage, ...]) -> list[int]:
    """Bytes of ``x_0`` to ``x_n``: block i's input and block i - 1's output, the larger where they differ."""
    inside = (max(left.output_bytes, right.input_bytes) for left, right in pairwise(stages))
    return [stages[0].input_bytes, *inside, stages[-1].output_bytes]


def span(item: Item) -> tuple[int, int]:
    """The blocks ``start`` to ``end - 1`` of an item, as (start, end)."""
    return (item.index, item.index + 1) if isinstance(item, Keep) else (item.start, item.end)


def _check_cover(items: tuple[Item, ...], start: int, end: int, *, top: bool) -> None:
    at = start
    for item in items:
        first, last = span(item)
        if first != at or last <= first or (item.offload and not top):
            break
        if isinstance(item, Segment):
            _check_cover(item.inner, first, last, top=False)
        at = last
    else:
        if at == end:
            return
    where = "the plan" if top else f"the Segment of blocks {start} to {end - 1}"
    raise ValueError(
        f"Plan: got {items} in {where}; expected each of the blocks {start} to {end - 1} once, in their order, and nothing"
        " offloaded inside a Segment. Mend the items."
    )
