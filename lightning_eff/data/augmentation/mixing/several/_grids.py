"""Choose the input of each block of a grid: labellings of low energy, for one grid or several together."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

_GAIN = 1e-12  # a smaller decrease of the energy is rounding error
_ROUNDS = 64  # a limit on expansions that is never reached


@cache
def neighbours(n: int, rows: int) -> Floats:
    """Return which of the n blocks of a grid, in row order, are adjacent: (n, n) zeros and ones."""
    row, column = np.divmod(np.arange(n), n // rows)
    away = np.abs(row[:, None] - row) + np.abs(column[:, None] - column)
    return (away == 1).astype(float)


def potts(cost: Floats, rows: int, beta: float, labels: Integers) -> float:
    """Return ``sum_k c[z_k, k] + beta * #{neighbours k, k' : z_k != z_k'}``.

    Args:
        cost: ``c``, (m, n), the cost of each label in each of n blocks.
        rows: the number of rows of the grid.
        beta: the cost of a border between two blocks.
        labels: ``z``, (n,).
    """
    borders = (neighbours(len(labels), rows) * (labels[:, None] != labels)).sum() / 2
    return float(cost[labels, np.arange(len(labels))].sum() + beta * borders)


def least(cost: Floats, rows: int, beta: float) -> Integers:
    """Return a labelling that no expansion of a label improves, starting from the cheapest label of each block: (n,).

    An expansion changes any set of blocks to one label. The best set is found exactly (Boykov, Veksler & Zabih 2001), and the
    label with the largest improvement goes first. With two labels, or ``beta=0``, the labelling is optimal. With more labels
    and nonnegative costs its energy is at most twice the optimum.

    Args:
        cost: ``c``, (m, n), as for :func:`potts`.
        rows: the number of rows of the grid.
        beta: the cost of a border, nonnegative.
    """
    labels = cost.argmin(axis=0)
    if beta == 0:
        return labels
    for _ in range(_ROUNDS):
        label, has, gain = _expansion(cost, rows, beta, labels)
        if gain <= _GAIN:
            break
        labels = np.where(has, label, labels)
    return labels


def _expansion(cost: Floats, rows: int, beta: float, labels: Integers) -> tuple[int, Bools, float]:
    """Return the label whose best expansion lowers the energy most, the blocks that have it then, (n,), and the decrease."""
    at = np.arange(len(labels))
    beside = neighbours(len(labels), rows)
    alike = beside * (labels[:, None] == labels)
    # f(S) for the set S of blocks that change to a label: the sum of own, minus pull over pairs of blocks with that label
    pull = beta * (beside + alike)
    own = cost - cost[labels, at] + beta * alike.sum(axis=1)
    has = labels == np.arange(len(cost))[:, None]
    # the minimiser lies between two sets: blocks that change even alone, and blocks that change if all others do
    low, high = has.copy(), np.ones_like(has)
    while True:
        lower = low | (high & (own - low @ pull < -_GAIN))
        higher = has | (high & (own - high @ pull < -_GAIN))
        if (lower == low).all() and (higher == high).all():
            break
        low, high = lower, higher
    between = high & ~low
    gain = _gain(low, has, own, pull)
    # an upper bound of the gain of any set that contains low
    alone = own - low @ pull - between @ pull / 2
    most = gain - np.where(between, np.minimum(alone, 0.0), 0.0).sum(axis=1)
    open_to = np.flatnonzero(between.any(axis=1) & (most > max(gain.max(), _GAIN)))
    if len(open_to):
        low[open_to] = _cheapest(own[open_to], has[open_to], pull, rows)
        gain[open_to] = _gain(low[open_to], has[open_to], own[open_to], pull)
    best = int(gain.argmax())
    return best, low[best], float(gain[best])


def _gain(held: Bools, has: Bools, own: Floats, pull: Floats) -> Floats:
    """Return the decrease of the energy if the blocks ``held`` have a label that the blocks ``has`` have now: (m,)."""
    comes = held & ~has
    return ((0.5 * comes + has) @ pull * comes - own * comes).sum(axis=1)


def _cheapest(own: Floats, has: Bools, pull: Floats, rows: int) -> Bools:
    """Return for each label the set with the smallest ``f`` that contains ``has``: (m, n), by dynamic programming over rows."""
    m, n = own.shape
    width = n // rows
    states = np.arange(2 ** (width - 1))  # which of the last blocks are in the set; the last one is the lowest bit
    left = (states & 1 if width > 1 else np.zeros_like(states)).astype(float)
    value = np.full((m, 2, len(states)), np.inf)  # the second dimension is the highest bit, the block above
    value[:, 0, 0] = 0.0
    above_was_in = np.empty((n, m, len(states), 2), dtype=bool)
    for k in range(n):
        above = pull[k - width, k] if k >= width else 0.0
        beside = pull[k - 1, k] if k % width else 0.0
        out, came = value[:, 0], value[:, 1]
        above_was_in[k, :, :, 0] = came < out
        above_was_in[k, :, :, 1] = came - above < out
        following = np.empty((m, len(states), 2))
        following[:, :, 0] = np.where(has[:, k, None], np.inf, np.minimum(out, came))
        following[:, :, 1] = (
            np.minimum(out, came - above) - beside * left + np.where(has[:, k], 0.0, own[:, k])[:, None]
        )
        value = following.reshape(m, 2, len(states))
    held, at, row = np.empty((m, n), dtype=bool), value.reshape(m, -1).argmin(axis=1), np.arange(m)
    for k in reversed(range(n)):
        held[:, k] = at & 1
        at = (at >> 1) | (above_was_in[k, row, at >> 1, at & 1].astype(int) << (width - 1))
    return held


@dataclass(frozen=True)
class Weights:
    """The weights of the terms of :func:`energy`, for grids of any size.

    Attributes:
        beta: the weight of borders between blocks of different inputs. Each costs ``beta / n`` for n blocks.
        gamma: the weight of blocks of one input in two grids. Each costs ``gamma / n``.
        tau: the number of grids' worth of blocks of one input that the other grids may have without penalty.
    """

    beta: float
    gamma: float
    tau: float

    def penalty(self, cost: Floats, compatible: Floats, taken: Floats) -> Floats:
        """Return ``gamma / n * h(A t)`` for ``t`` blocks taken, (..., m), with ``h(x) = x`` if ``x > tau n``, otherwise 0."""
        n = cost.shape[1]
        much = taken @ compatible
        return self.gamma / n * np.where(much > self.tau * n, much, 0.0)


def counts(grids: Integers, inputs: int) -> Floats:
    """Return ``o_j``, the number of blocks of each input in each grid: (m', m), for grids (m', n)."""
    return (grids[:, :, None] == np.arange(inputs)).sum(axis=1).astype(float)


def energy(grids: Integers, cost: Floats, rows: int, compatible: Floats, weights: Weights) -> float:
    """Return ``sum_j [ sum_k c[z_jk, k] + beta / n * #borders_j + gamma / n * o_j . h(A sum_{i != j} o_i) ]``.

    Args:
        grids: ``z``, (m', n), the input of each block of each grid.
        cost: ``c``, (m, n).
        rows: the number of rows of each grid.
        compatible: ``A``, (m, m), symmetric: the cost of a block of one input given a block of another in another grid.
        weights: ``beta``, ``gamma`` and ``tau``.
    """
    own = counts(grids, len(cost))
    apart = weights.penalty(cost, compatible, own.sum(axis=0) - own)
    smooth = sum(potts(cost, rows, weights.beta / cost.shape[1], z) for z in grids)
    return float(smooth + (apart * own).sum())


def together(
    cost: Floats, rows: int, compatible: Floats, weights: Weights, start: Integers, iterations: int
) -> Integers:
    """Find grids of low :func:`energy` by optimising one grid at a time, given the others: (m', n).

    Given the others, a grid ``z_j`` minimises ``c + 2 gamma / n * h(A sum_{i != j} o_i)`` plus its borders. This uses the
    derivative of the supermodular term that couples the grids. The result is the best of all iterations and of the grids that
    have the cheapest input in each block.

    Args:
        cost: ``c``, (m, n).
        rows: the number of rows of each grid.
        compatible: ``A``, as for :func:`energy`.
        weights: ``beta``, ``gamma`` and ``tau``.
        start: the initial grids, (m', n).
        iterations: the largest number of times that each grid is optimised.
    """
    n = cost.shape[1]
    kept = np.broadcast_to(cost.argmin(axis=0), start.shape).copy()
    least_yet = energy(kept, cost, rows, compatible, weights)
    grids, own = start.copy(), counts(start, len(cost))
    for _ in range(iterations):
        before = grids.copy()
        for j in range(len(grids)):
            apart = weights.penalty(cost, compatible, own.sum(axis=0) - own[j])
            grids[j] = least(cost + 2 * apart[:, None], rows, weights.beta / n)
            own[j] = counts(grids[j : j + 1], len(cost))[0]
        found = energy(grids, cost, rows, compatible, weights)
        if found < least_yet:
            kept, least_yet = grids.copy(), found
        if (grids == before).all():
            break
    return kept
