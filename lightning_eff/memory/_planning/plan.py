"""A plan of what a chain of blocks keeps between forward and backward, and what is predicted of it.

Counted in a peak are, at each moment: the inputs and saved tensors that are kept, the tensor and the gradient that travel
along the chain, and what the block that runs needs beyond them. The input of the first block is counted, and the output of
the last; what is outside the chain (embeddings, head, loss, parameters) is not.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isqrt
from pathlib import Path

from lightning_eff.memory._planning import prediction, view
from lightning_eff.memory._planning.chain import Action, Event, Item, Keep, Segment, Stage, span


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
        return prediction.offloaded_bytes(self)

    @cached_property
    def schedule(self) -> tuple[Event, ...]:
        """The whole schedule, event by event."""
        return prediction.schedule(self)

    def room(self, item: int) -> tuple[int | None, int]:
        """How far copies may lag behind, and run ahead, at one of ``items``, for what runs the plan to hold to.

        Returns:
            unsent: when the item's first block begins its first forward run, at most so many bytes of the offloaded items
                before it may be on the device still; wait until it is so. None: any number, the plan has no budget.
            returned: while the item is in its backward pass (all of it, for a Segment), so many bytes of the offloaded
                items before it, the last of them first, are brought back beside it, and no more.
        """
        return prediction.room(self, self.schedule, item)

    @property
    def peak_bytes(self) -> int:
        """The most that the chain holds at any moment."""
        return max(event.held_bytes for event in self.schedule)

    @property
    def seconds(self) -> float:
        """Of one forward and backward pass through the chain, recomputation and waiting for copies included."""
        return self.schedule[-1].end_seconds

    def _predicted(self) -> view.Predicted:
        return view.Predicted(
            self.stages,
            self.items,
            self.budget_bytes,
            self.actions,
            self.forward_calls,
            self.offloaded_bytes,
            self.schedule,
            self.peak_bytes,
            self.seconds,
        )

    def table(self) -> str:
        """The plan as lines of text."""
        return view.table(self._predicted(), keep_all(self.stages)._predicted())

    def __str__(self) -> str:
        return self.table()

    def draw(self, path: str | Path) -> None:
        """Draw what happens to each block, and the bytes held over the schedule against the budget.

        Args:
            path: of the picture; its ending says the format: .png, .svg, .pdf.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        view.draw(self._predicted(), path)


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
