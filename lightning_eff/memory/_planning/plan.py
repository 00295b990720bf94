"""A plan for the tensors that a chain of blocks stores between forward and backward, with predicted memory and time.

A peak counts, at each moment, the stored inputs and saved tensors, the tensor and the gradient that travel along the chain,
and what the running block needs beyond them. The input of the first block and the output of the last are included. Anything
outside the chain (embeddings, head, loss, parameters) is not.
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
    """The treatment of each block of a chain.

    Args:
        stages: the chain.
        items: Keeps and Segments that cover each block once, in forward order. Items inside Segments are not offloaded.
        budget_bytes: the budget of the plan; None for a plan without one.
        bandwidth_bytes_per_second: the speed of copies in each direction, needed for offloading.

    Raises:
        ValueError: if the items do not cover the blocks, or there is offloading without a bandwidth.
    """

    stages: tuple[Stage, ...]
    items: tuple[Item, ...]
    budget_bytes: int | None = None
    bandwidth_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("Plan: got no stages. Name the stack of blocks.")
        _check_cover(self.items, 0, len(self.stages), top=True)
        if any(item.offload for item in self.items) and not self.bandwidth_bytes_per_second > 0:
            raise ValueError(
                f"Plan: got offloaded items and bandwidth_bytes_per_second={self.bandwidth_bytes_per_second}; expected a"
                " bandwidth > 0. Measure the copies, or remove offload=True."
            )

    @cached_property
    def forward_calls(self) -> tuple[int, ...]:
        """The number of forward runs of each block in a forward and backward pass: 1, plus one per Segment around it."""
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
        """The treatment of each block; a block of a Segment is RECOMPUTE, even if the Segment's input is offloaded."""
        actions: list[Action] = []
        for item in self.items:
            if isinstance(item, Keep):
                actions.append(Action.OFFLOAD if item.offload else Action.KEEP)
            else:
                actions += [Action.RECOMPUTE] * (item.end - item.start)
        return tuple(actions)

    @cached_property
    def offloaded_bytes(self) -> int:
        """The bytes that move to the host in a forward pass, and back in the backward pass."""
        return prediction.offloaded_bytes(self)

    @cached_property
    def schedule(self) -> tuple[Event, ...]:
        """The whole schedule, event by event."""
        return prediction.schedule(self)

    def room(self, item: int) -> tuple[int | None, int]:
        """Return how far copies may lag behind, or run ahead, at one of ``items``, for an execution of the plan.

        Returns:
            unsent: when the item's first block begins its first forward run, at most this many bytes of earlier offloaded items
                may still be on the device, so wait for it. None, without a budget, allows any number.
            returned: during the item's backward pass (the whole pass, for a Segment), exactly this many bytes of earlier
                offloaded items are brought back, the last item first.
        """
        return prediction.room(self, self.schedule, item)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the chain holds at any moment."""
        return max(event.held_bytes for event in self.schedule)

    @property
    def seconds(self) -> float:
        """The time of a forward and backward pass through the chain, with recomputation and waiting for copies."""
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
        """Return the plan as text."""
        return view.table(self._predicted(), keep_all(self.stages)._predicted())

    def __str__(self) -> str:
        return self.table()

    def draw(self, path: str | Path) -> None:
        """Plot the treatment of each block, and the bytes held over the schedule against the budget.

        Args:
            path: the file of the picture. Its suffix is the format: .png, .svg, .pdf.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        view.draw(self._predicted(), path)


def keep_all(stages: tuple[Stage, ...]) -> Plan:
    """Return the plan without recomputation, which is plain training."""
    return Plan(stages, tuple(Keep(i) for i in range(len(stages))))


def full(stages: tuple[Stage, ...]) -> Plan:
    """Return the plan that recomputes each block, also the last one, from its own input."""
    return Plan(stages, tuple(recomputed(i, i + 1) for i in range(len(stages))))


def sqrt(stages: tuple[Stage, ...]) -> Plan:
    """Return ``round(sqrt(n))`` segments of nearly equal length (Chen et al. 2016, arXiv:1604.06174, section 4.1).

    The last segment is stored, since it would be recomputed at once, with everything it saves in memory again.
    """
    n = len(stages)
    root = isqrt(n)
    return segments(stages, root + (n > root * (root + 1)))


def segments(stages: tuple[Stage, ...], count: int) -> Plan:
    """Return ``count`` segments of nearly equal length, in [1, n]; all but the last, which is stored, are recomputed once."""
    bounds = [len(stages) * k // count for k in range(count + 1)]
    items: list[Item] = [recomputed(start, end) for start, end in pairwise(bounds[:-1])]
    return Plan(stages, (*items, *(Keep(i) for i in range(bounds[-2], len(stages)))))


def recomputed(start: int, end: int) -> Segment:
    """Return blocks ``start`` to ``end - 1`` as a Segment that is recomputed once."""
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
        f"Plan: got {items} in {where}; expected each of the blocks {start} to {end - 1} once, in their order, and no"
        " offloading inside a Segment. Correct the items."
    )
