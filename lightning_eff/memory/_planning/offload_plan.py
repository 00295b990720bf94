"""Keep, recompute or offload each activation, solved jointly: the problem of Beaumont et al. 2021.

"Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS 2021. The algorithm is our own. Read
from its end, the backward pass is a forward pass: what must be back before an item's turn is what has not left yet after
it. One sweep over the blocks, from the first on, therefore serves both. A label is a treatment of the blocks before ``s``::

    held      bytes of them that stay on the device from their forward to their backward pass
    unsent    bytes on their way to the host when the forward pass reaches block s
    returned  bytes that are back for them when the backward pass has finished block s
    seconds   time used so far in both passes, waits included

A run that needs ``need`` bytes beyond ``held`` begins when its queue, ``unsent`` or ``returned``, is at most
``budget - held - need``. The queue loses ``bandwidth * seconds`` bytes while it runs or waits. A label is superfluous if
another one of the same block holds no more, and would not be later even if it first waited until its queues are no longer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_eff.memory._planning.chain import Item, Keep, Segment, Stage, span
from lightning_eff.memory._planning.plan import Plan
from lightning_eff.memory._planning.rotor import Chain, optimal, smallest_budget
from lightning_eff.memory._planning.view import amount

SHORT = 8  #: up to this many blocks, every inner plan is tried; in longer chains, FEW per Segment, from fast to small
FEW = 4


def optimal_with_offload(
    stages: tuple[Stage, ...], budget_bytes: int, bandwidth_bytes_per_second: float, slots: int = 500
) -> Plan:
    """Return the fastest plan within ``budget_bytes`` that keeps, recomputes or offloads each activation.

    The problem: a sequence of items, each a Keep or a Segment, each with its starting point (for a Keep also its interior)
    on the device or in host memory; inside a Segment any plan without offloading. Copies run one after another, out in the
    forward pass and back in the backward pass, at the bandwidth, in parallel with the computation. Bytes leave and enter
    the device as they are copied, and an item's copy begins when its first block has run. At the turn, everything has left
    before anything returns. A Segment waits for room before its backward pass begins, not within it.

    The solution is exact for chains of up to 8 blocks, as long as at most ``8 * slots`` labels remain at a block. In longer
    chains, four inner plans of each Segment are tried, from the fastest to the smallest, and labels beyond ``slots`` are
    thinned to the fastest of each neighbourhood. The plan's prediction stays exact, but a faster plan may exist. It is
    never slower than ``optimal`` for the same budget, and equal to it for bandwidth 0.

    Args:
        stages: the chain, n >= 1 blocks.
        budget_bytes: the most bytes that the chain may hold on the device, its input included.
        bandwidth_bytes_per_second: the speed of copies in the slower direction, >= 0.
        slots: the number of labels of a block that continue, and see ``optimal``; >= 2.

    Raises:
        ValueError: if the budget is smaller than ``smallest_budget_with_offload(stages)``, the bandwidth is negative, or
            ``slots < 2``.
    """
    if not bandwidth_bytes_per_second >= 0:
        raise ValueError(
            f"optimal_with_offload: got {bandwidth_bytes_per_second=}; expected a number >= 0. Measure the copies again."
        )
    if bandwidth_bytes_per_second == 0:
        return optimal(stages, budget_bytes, slots)
    if slots < 2:
        raise ValueError(f"optimal_with_offload: got {slots=}; expected >= 2. Use more slots, such as 500.")
    least = smallest_budget_with_offload(stages)
    if budget_bytes < least:
        raise ValueError(
            f"optimal_with_offload: got budget_bytes={budget_bytes} ({amount(budget_bytes)}); expected at least {least}"
            f" ({amount(least)}), the size of the largest of these {len(stages)} blocks. Raise the memory budget, or use a"
            " smaller batch."
        )
    without = optimal(stages, budget_bytes, slots) if budget_bytes >= smallest_budget(stages) else None
    search = _Search(
        Chain(stages), budget_bytes, bandwidth_bytes_per_second, most=8 * slots if len(stages) <= SHORT else slots
    )
    items = search.run(np.inf if without is None else without.seconds)
    if items is None:
        assert without is not None, "offloading every block fits the budget"
        items = without.items
    return Plan(stages, items, budget_bytes, bandwidth_bytes_per_second)


def smallest_budget_with_offload(stages: tuple[Stage, ...]) -> int:
    """Return the smallest ``budget_bytes`` with a plan: the one in which each block is alone on the device."""
    chain = Chain(stages)
    return max(max(_keep_needs(chain, s)) for s in range(len(stages)))


def _keep_needs(chain: Chain, s: int) -> tuple[int, int]:
    """Return the device memory of block s in a forward run that saves and in its backward run, ``x_s`` included."""
    stage, before, after = chain.stages[s], int(chain.x[s]), int(chain.x[s + 1])
    saved = before + int(chain.interior[s]) + after
    return saved + stage.forward_peak_bytes, saved + after + before + stage.backward_peak_bytes


@dataclass(frozen=True)
class _Inner:
    """A plan for the blocks of a Segment: its peak beyond the Segment's input, its seconds, and its items."""

    peak: int
    seconds: float
    items: tuple[Item, ...]


def _inner_plans(chain: Chain) -> dict[tuple[int, int], list[_Inner]]:
    """Return for each s <= t the plans that no other beats in both peak and seconds, the smallest first."""
    n = len(chain)
    plans: dict[tuple[int, int], list[_Inner]] = {}
    for length in range(n):
        for s in range(n - length):
            t = s + length
            found = sorted(_inner_of(chain, plans, s, t), key=lambda made: (made[0], made[1]))
            best: list[tuple[int, float, int, int, int]] = []
            for made in found:
                if not best or made[1] < best[-1][1]:
                    best.append(made)
            if n > SHORT and len(best) > FEW:
                best = [best[round(k * (len(best) - 1) / (FEW - 1))] for k in range(FEW)]
            plans[s, t] = [_Inner(peak, seconds, _inner_items(plans, s, t, *how)) for peak, seconds, *how in best]
    return plans


def _inner_of(
    chain: Chain, plans: dict[tuple[int, int], list[_Inner]], s: int, t: int
) -> Iterator[tuple[int, float, int, int, int]]:
    """Yield (peak, seconds, k, place of the plan from k on, place of the plan before k); for k = s, block s is stored."""
    x, gradient = chain.x, int(chain.x[t + 1])
    need, once = chain.keep_need(s, gradient), float(chain.once[s])
    if s == t:
        yield need, float(chain.last[s]), s, 0, 0
        return
    stored = int(chain.interior[s] + x[s + 1])
    for place, rest in enumerate(plans[s + 1, t]):
        yield max(need, stored + rest.peak), once + rest.seconds, s, place, 0
    for k in range(s + 1, t + 1):
        passing, through = (
            gradient + int(chain.pass_needs[s, k]),
            float(chain.forward_until[k] - chain.forward_until[s]),
        )
        for (right, rest), (left, again) in product(enumerate(plans[k, t]), enumerate(plans[s, k - 1])):
            peak = max(passing, int(x[k]) + rest.peak, again.peak)
            yield peak, through + rest.seconds + again.seconds, k, right, left


def _inner_items(
    plans: dict[tuple[int, int], list[_Inner]], s: int, t: int, k: int, right: int, left: int
) -> tuple[Item, ...]:
    if k == s:
        return (Keep(s), *(plans[s + 1, t][right].items if s < t else ()))
    return (Segment(s, k, plans[s, k - 1][left].items), *plans[k, t][right].items)


@dataclass
class _Labels:
    """The labels of one block, arrays of shape (count,); ``parent`` is the label that each came from, ``way`` the item."""

    held: NDArray[np.int64]
    unsent: NDArray[np.float64]
    returned: NDArray[np.float64]
    seconds: NDArray[np.float64]
    parent: NDArray[np.int64]
    way: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.held)

    def take(self, which: NDArray[Any]) -> "_Labels":
        return _Labels(*(values[which] for values in vars(self).values()))


def _concatenate(parts: list[_Labels]) -> _Labels:
    return _Labels(*(np.concatenate(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))


class _Search:
    def __init__(self, chain: Chain, budget: int, rate: float, most: int) -> None:
        self.chain, self.budget, self.rate, self.most = chain, budget, rate, most
        self.inner = _inner_plans(chain)
        self.after = np.cumsum([0.0, *chain.once[::-1]])[::-1]  # the least seconds of all blocks from s on
        self.ways: list[Item] = []

    def run(self, bound: float) -> tuple[Item, ...] | None:
        """Return the items of the fastest plan below ``bound`` seconds, or None without one."""
        n = len(self.chain)
        self.bound = bound * (1 - 1e-12)
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        start = _Labels(none, zero, zero, zero, none, none)
        self.arrived = [[start.take(none[:0] if s else none)] for s in range(n + 1)]
        settled: list[_Labels] = []
        for s in range(n):
            settled.append(self._best(_concatenate(self.arrived[s])))
            self._advance(s, settled[s])
        ends = _concatenate(self.arrived[n])
        seconds = ends.seconds + (ends.unsent + ends.returned) / self.rate
        if not len(ends) or seconds.min() >= self.bound:
            return None
        label, items = ends.take(np.argmin(seconds, keepdims=True)), []
        while True:
            items.append(self.ways[int(label.way[0])])
            start, _ = span(items[-1])
            if start == 0:
                return tuple(reversed(items))
            label = settled[start].take(label.parent)

    def _advance(self, s: int, labels: _Labels) -> None:
        """Continue each label of block s with each item that begins there."""
        chain, x, own = self.chain, self.chain.x, int(self.chain.x[s])
        labels = replace(labels, parent=np.arange(len(labels)))
        forward_need, backward_need = _keep_needs(chain, s)
        kept = self._run(labels, "unsent", forward_need, chain.stages[s].forward_seconds)
        kept = self._run(kept, "returned", backward_need, chain.stages[s].backward_seconds)
        size = own + int(chain.interior[s])
        self._arrive(s + 1, Keep(s), kept, held=size)
        self._arrive(s + 1, Keep(s, offload=True), kept, unsent=size, returned=size)
        for offload in (False, True):
            passed = labels
            for j in range(s, len(chain)):
                need = int(x[j] + x[j + 1]) + chain.stages[j].forward_peak_bytes + (own if j > s and not offload else 0)
                passed = self._run(passed, "unsent", need, chain.stages[j].forward_seconds)
                if offload and j == s:
                    passed = replace(passed, unsent=passed.unsent + own)
                for inner in self.inner[s, j]:
                    again = self._run(passed, "returned", own + inner.peak, inner.seconds)
                    item = Segment(s, j + 1, inner.items, offload)
                    self._arrive(j + 1, item, again, **{"returned" if offload else "held": own})

    def _run(self, labels: _Labels, queue: Literal["unsent", "returned"], need: int, seconds: float) -> _Labels:
        """Return the labels with room for the run, after waiting until the queue allows it, and after the run."""
        labels = labels.take(labels.held + need <= self.budget)
        before: NDArray[np.float64] = getattr(labels, queue)
        begins = np.minimum(before, self.budget - need - labels.held)
        taken = labels.seconds + (before - begins) / self.rate + seconds
        left = np.maximum(begins - self.rate * seconds, 0.0)
        return replace(labels, seconds=taken, **{queue: left})

    def _arrive(
        self, e: int, item: Item, labels: _Labels, *, held: int = 0, unsent: int = 0, returned: int = 0
    ) -> None:
        """Add labels at block e, except those that cannot be faster than the bound."""
        labels = labels.take(labels.seconds + self.after[e] < self.bound)
        if len(labels):
            way = np.full(len(labels), len(self.ways))
            self.ways.append(item)
            sums = (labels.held + held, labels.unsent + unsent, labels.returned + returned)
            self.arrived[e].append(_Labels(*sums, labels.seconds, labels.parent, way))

    def _best(self, labels: _Labels) -> _Labels:
        """Return the labels that no other of the same block makes superfluous, thinned if there are too many."""
        labels = labels.take(np.lexsort((labels.unsent + labels.returned, labels.held, labels.seconds)))
        labels = self._thin(labels, 4 * self.most)
        best = labels.take(np.zeros(0, dtype=np.int64))
        for at in range(0, len(labels), 256):
            some = labels.take(np.arange(at, min(at + 256, len(labels))))
            some = some.take(np.flatnonzero(~self._superfluous(best, some).any(axis=0)))
            some = some.take(np.flatnonzero(~np.triu(self._superfluous(some, some), k=1).any(axis=0)))
            best = _concatenate([best, some])
        return self._thin(best, self.most)

    def _superfluous(self, by: _Labels, labels: _Labels) -> NDArray[np.bool_]:
        """Return whether label i of ``by`` makes label j of ``labels`` superfluous, shape (len(by), len(labels))."""
        seconds = np.repeat(by.seconds[:, None], len(labels), axis=1)
        for queue in ("unsent", "returned"):
            longer = getattr(by, queue)[:, None] - getattr(labels, queue)
            seconds += np.maximum(longer, 0.0) / self.rate
        return (seconds <= labels.seconds) & (by.held[:, None] <= labels.held)

    def _thin(self, labels: _Labels, most: int) -> _Labels:
        """Return about ``most`` labels, sorted by seconds: the fastest of each cell of held, unsent and returned."""
        if len(labels) <= most:
            return labels
        cell = np.zeros(len(labels), dtype=np.int64)
        for values, steps in ((labels.held, max(most // 16, 2)), (labels.unsent, 4), (labels.returned, 4)):
            width = max(float(values.max()), 1.0) / (steps - 1)
            cell = cell * steps + np.rint(values / width).astype(np.int64)
        _, first = np.unique(cell, return_index=True)
        return labels.take(np.sort(first))
