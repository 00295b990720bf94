"""The fastest plan for a budget: the dynamic program for heterogeneous chains of Herrmann et al. 2019 (HAL-02352969).

``C(s, t, m)`` is the least time to run blocks ``s`` to ``t`` forward and backward with ``m`` bytes beyond the input ``x_s``,
which the caller holds, and with the gradient of ``x_{t+1}`` given, unless ``t`` is the last block of all (section 4)::

    C(s, t, m) = the least of
      keep block s:           f_s + b_s + C(s+1, t, m - interior_s - x_{s+1})             if m >= A(s, t)
      store x_k, s < k <= t:  f_s + ... + f_{k-1} + C(k, t, m - x_k) + C(s, k-1, m)       if m >= E(s, k, t)

    C(t, t, m) = f'_t + b_t    if m >= A(t, t), where f' ends with the last saved tensor; f_t + b_t for the last block of all

    A(s, t)    = interior_s + x_{s+1} + max(gradient_t + forward_peak_s,  x_s + x_{s+1} + backward_peak_s)
    E(s, k, t) = gradient_t + max over s <= j < k of  (x_j if j > s) + x_{j+1} + forward_peak_j

with ``gradient_t = x_{t+1}``, or 0 at the last block, whose gradient comes after its forward run. It is optimal among
persistent schedules, in which what is stored for the backward pass stays until the backward pass uses it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_eff.memory._planning.chain import Item, Keep, Segment, Stage, boundaries
from lightning_eff.memory._planning.plan import Plan, full, keep_all, segments
from lightning_eff.memory._planning.view import amount

EXACT = 2000  #: up to this many different amounts of remaining memory at a block, all are distinguished

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def optimal(stages: tuple[Stage, ...], budget_bytes: int, slots: int = 500) -> Plan:
    """Return the fastest plan whose peak is at most ``budget_bytes``.

    It is exact if a block can have few different amounts of remaining memory (2,000, or ``slots`` if that is more). This holds
    for chains of up to 9 blocks of any kind, and for long chains of equal blocks or of sizes with a large common divisor. In
    other chains, amounts are rounded to ``slots`` steps. The fastest of the resulting plans, and of Chen's segments of any
    number, whose exact peak is within the budget is returned. A larger budget never gives a slower plan, and no plan's peak is
    over the budget.

    Args:
        stages: the chain, n >= 1 blocks.
        budget_bytes: the most bytes that the chain may hold, its input included.
        slots: the steps to which memory is rounded, if amounts cannot be distinguished exactly; >= 2.

    Raises:
        ValueError: if the budget is smaller than ``smallest_budget(stages)``, or ``slots < 2``.
    """
    if slots < 2:
        raise ValueError(f"optimal: got {slots=}; expected >= 2. Use more slots, such as 500.")
    everything = keep_all(stages)
    if everything.peak_bytes <= budget_bytes:
        return Plan(stages, everything.items, budget_bytes)
    chain = Chain(stages)
    least, frugal = _most_frugal(chain)
    if budget_bytes < least:
        raise ValueError(
            f"optimal: got budget_bytes={budget_bytes} ({amount(budget_bytes)}); expected at least {least} ({amount(least)}),"
            f" the smallest budget for these {len(stages)} blocks. Raise the memory budget, or use a smaller batch."
        )
    used = _amounts_used(chain, max(EXACT, slots))
    if used is not None:
        return Plan(stages, _solve_exactly(chain, used, budget_bytes), budget_bytes)
    few = _amounts_used(chain, max(EXACT, slots), within=least)
    found: list[tuple[Item, ...] | None] = [frugal if few is None else _solve_exactly(chain, few, least)]
    found += [_solve_in_slots(chain, top, slots, budget_bytes) for top in _tops(everything.peak_bytes, least)]
    plans = [Plan(stages, items, budget_bytes) for items in found if items is not None]
    for chen in (full(stages), *(segments(stages, count) for count in range(2, len(stages) + 1))):
        plans.append(Plan(stages, chen.items, budget_bytes))
    return min((plan for plan in plans if plan.peak_bytes <= budget_bytes), key=lambda plan: plan.seconds)


def smallest_budget(stages: tuple[Stage, ...]) -> int:
    """Return the smallest ``budget_bytes`` with a plan."""
    return _most_frugal(Chain(stages))[0]


@dataclass(frozen=True)
class Chain:
    """The numbers of a chain of n blocks, as arrays. Bytes are exact in float64 up to 2**53."""

    stages: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def x(self) -> Ints:
        """The bytes of ``x_0`` to ``x_n``, shape (n + 1,)."""
        return np.array(boundaries(self.stages), dtype=np.int64)

    @cached_property
    def interior(self) -> Ints:
        """The bytes that a block saves, without its output, shape (n,)."""
        return np.array([s.saved_bytes - s.output_bytes for s in self.stages], dtype=np.int64)

    @cached_property
    def forward_until(self) -> Floats:
        """The seconds of the forward runs of all blocks before i, shape (n + 1,)."""
        return np.concatenate([[0.0], np.cumsum([s.forward_seconds for s in self.stages])])

    @cached_property
    def once(self) -> Floats:
        """``f_i + b_i``, shape (n,)."""
        return np.array([s.forward_seconds + s.backward_seconds for s in self.stages])

    @cached_property
    def last(self) -> Floats:
        """``f'_i + b_i``, for a Segment's last block that is stored, shape (n,)."""
        return np.array([s.last_seconds + s.backward_seconds for s in self.stages])

    def gradient(self, t: int) -> int:
        """Return the bytes of the gradient that is held while blocks up to ``t`` run forward."""
        return int(self.x[t + 1]) if t < len(self) - 1 else 0

    def keep_need(self, s: int, gradient: int) -> int:
        """Return ``A(s, t)``, given ``gradient_t``."""
        stage, before, after = self.stages[s], int(self.x[s]), int(self.x[s + 1])
        peak = max(gradient + stage.forward_peak_bytes, before + after + stage.backward_peak_bytes)
        return int(self.interior[s]) + after + peak

    @cached_property
    def pass_needs(self) -> Ints:
        """``E(s, k, t) - gradient_t`` for s < k, shape (n, n + 1)."""
        n = len(self)
        needs = np.zeros((n, n + 1), dtype=np.int64)
        for s in range(n):
            runs = self.x[s + 1 :] + [stage.forward_peak_bytes for stage in self.stages[s:]]
            runs[1:] += self.x[s + 1 : n]
            needs[s, s + 1 :] = np.maximum.accumulate(runs)
        return needs


def _most_frugal(chain: Chain) -> tuple[int, tuple[Item, ...]]:
    """Return the least peak of any plan, and a plan with it: the same recursion with bytes instead of seconds."""
    n, x = len(chain), chain.x
    least = np.zeros((n, n), dtype=np.int64)
    choice = np.zeros((n, n), dtype=np.int64)
    for t in range(n):
        gradient = chain.gradient(t)
        for s in range(t, -1, -1):
            held = int(chain.interior[s] + x[s + 1]) + int(least[s + 1, t]) if s < t else 0
            peaks = [max(chain.keep_need(s, gradient), held)]
            if s < t:
                cuts = np.maximum(x[s + 1 : t + 1] + least[s + 1 : t + 1, t], least[s, s:t])
                peaks += np.maximum(cuts, gradient + chain.pass_needs[s, s + 1 : t + 1]).tolist()
            choice[s, t] = int(np.argmin(peaks))
            least[s, t] = peaks[choice[s, t]]

    def items(s: int, t: int) -> tuple[Item, ...]:
        cut = int(choice[s, t])
        if cut == 0:
            return (Keep(s), *(items(s + 1, t) if s < t else ()))
        return (Segment(s, s + cut, items(s, s + cut - 1)), *items(s + cut, t))

    return int(x[0] + least[0, n - 1]), items(0, n - 1)


def _amounts_used(chain: Chain, most: int, within: float = np.inf) -> list[set[int]] | None:
    """Return for each block every possible amount stored before it, ``x_s`` included; None for more than ``most``."""
    amounts: list[set[int]] = [{0}]
    any_before: set[int] = {0}
    for s in range(1, len(chain)):
        own = int(chain.x[s])
        kept = int(chain.interior[s - 1]) + own
        reached = {u + own for u in any_before} | {u + kept for u in amounts[-1]}
        amounts.append({u for u in reached if u <= within})
        if len(amounts[-1]) > most:
            return None
        any_before |= amounts[-1]
    return amounts


def _solve_exactly(chain: Chain, used: list[set[int]], budget_bytes: int) -> tuple[Item, ...]:
    n, x = len(chain), chain.x
    top = budget_bytes - int(x[0])
    levels: list[Ints] = []
    for s in range(n):
        rest = chain.interior[s:] + x[s + 1 :]
        beside = max(max(stage.forward_peak_bytes, stage.backward_peak_bytes) for stage in chain.stages[s:])
        plenty = int(rest.sum() + 2 * x.max()) + beside  # enough to keep all the rest, up to any block
        remaining = np.array([top - u for u in used[s] if u <= top], dtype=np.int64)
        levels.append(np.unique(np.minimum(remaining, plenty)))

    def index(s: int, amounts: Ints) -> Ints:
        return np.searchsorted(levels[s], amounts, side="right") - 1

    table = _Table(chain, levels, index, tolerance=0.0)
    return table.items(0, n - 1, len(levels[0]) - 1)


def _tops(most: int, least: int) -> list[int]:
    """Return the amounts that are divided into slots: all that is ever needed, and a finer one for little memory."""
    return [most, 3 * least] if 4 * least < most else [most]


def _solve_in_slots(chain: Chain, top: int, slots: int, budget_bytes: int) -> tuple[Item, ...] | None:
    n, unit = len(chain), top / slots
    levels = [np.arange(slots + 1, dtype=np.float64) * unit] * n

    def index(s: int, amounts: Floats) -> Ints:
        return np.minimum(np.rint(amounts / unit), slots).astype(np.int64)

    table = _Table(chain, levels, index, tolerance=unit / 2)
    within = table.peak[n - 1, 0, : slots + 1] <= budget_bytes - chain.x[0]
    seconds = np.where(within, table.seconds[n - 1, 0, : slots + 1], np.inf)
    best = int(np.argmin(seconds))
    return table.items(0, n - 1, best) if np.isfinite(seconds[best]) else None


class _Table:
    """``C(s, t, m)`` for all s <= t and for the ``levels`` of m at s, the choices, and their exact peaks.

    Args:
        levels: for each s the amounts m, ascending.
        index: a function that returns the index of amounts in the levels of s; below 0 if they are less than any.
        tolerance: how far a level may be below the need. The exact peaks then decide whether a plan is within a budget.
    """

    def __init__(
        self,
        chain: Chain,
        levels: Sequence[Ints | Floats],
        index: Callable[[int, Any], Ints],
        tolerance: float,
    ) -> None:
        n, x = len(chain), chain.x
        self.chain = chain
        self.levels = [level + tolerance for level in levels]
        width = max(len(level) for level in levels) + 1  # the last column means no plan
        self.seconds = np.full((n, n, width), np.inf)  # of [t, s]
        self.peak = np.zeros((n, n, width), dtype=np.int64)
        self.choice = np.zeros((n, n, width), dtype=np.int16)  # 0: keep s; k - s: store x_k
        self.after_keep: list[Ints] = []  # the index of C(s + 1, t, m - interior_s - x_{s+1}) in [t] flattened
        self.after_store: list[Ints] = []  # likewise of C(k, t, m - x_k) for k > s, one row each
        for s, level in enumerate(levels[:-1]):
            rows = np.stack([index(k, level - x[k]) for k in range(s + 1, n)])
            starts = np.arange(s + 1, n)[:, None] * width
            self.after_store.append(np.where(rows < 0, width - 1, rows) + starts)
            kept = index(s + 1, level - chain.interior[s] - x[s + 1])
            self.after_keep.append(np.where(kept < 0, width - 1, kept) + (s + 1) * width)
        for t in range(n):
            for s in range(t, -1, -1):
                self._fill(s, t)

    def _fill(self, s: int, t: int) -> None:
        chain, level, size = self.chain, self.levels[s], len(self.levels[s])
        gradient = chain.gradient(t)
        need = chain.keep_need(s, gradient)
        if s == t:
            once = (chain.last if t < len(chain) - 1 else chain.once)[s]
            self.seconds[t, s, :size] = np.where(level < need, np.inf, once)
            self.peak[t, s, :size] = need
            return
        below, peak_below = self.seconds[t].reshape(-1), self.peak[t].reshape(-1)
        keep, store = self.after_keep[s], self.after_store[s][: t - s]
        needs = gradient + chain.pass_needs[s, s + 1 : t + 1]
        seconds = np.empty((t - s + 1, size))
        seconds[0] = below[keep] + chain.once[s]
        cuts = seconds[1:]
        np.take(below, store, out=cuts, mode="clip")
        cuts += self.seconds[s:t, s, :size]
        cuts += (chain.forward_until[s + 1 : t + 1] - chain.forward_until[s])[:, None]
        np.putmask(seconds, level < np.append(need, needs)[:, None], np.inf)
        choice = np.argmin(seconds, axis=0)
        at = np.arange(size)
        cut = np.maximum(choice, 1) - 1
        storing = np.maximum(chain.x[s + 1 + cut] + peak_below[store[cut, at]], self.peak[s + cut, s, at])
        keeping = chain.interior[s] + chain.x[s + 1] + peak_below[keep]
        peak = np.where(choice == 0, np.maximum(need, keeping), np.maximum(needs[cut], storing))
        self.peak[t, s, :size] = peak
        self.seconds[t, s, :size] = seconds[choice, at]
        self.choice[t, s, :size] = choice

    def items(self, s: int, t: int, at: int) -> tuple[Item, ...]:
        """Return the chosen plan for blocks s to t at level ``at`` of s."""
        if s == t:
            return (Keep(s),)
        cut, width = int(self.choice[t, s, at]), self.seconds.shape[2]
        if cut == 0:
            return (Keep(s), *self.items(s + 1, t, int(self.after_keep[s][at]) % width))
        k = s + cut
        return (
            Segment(s, k, self.items(s, k - 1, at)),
            *self.items(k, t, int(self.after_store[s][cut - 1, at]) % width),
        )
