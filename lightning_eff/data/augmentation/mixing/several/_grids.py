"""Which of several inputs each block of a grid is taken from: labellings of little energy, of one grid or many at once."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

_GAIN = 1e-12  # an energy that falls by less is the same but for rounding
_ROUNDS = 64  # of expansions: an end that is never come to


@cache
def neighbours(n: int, rows: int) -> Floats:
    """Which of the n blocks of a grid, counted row after row, lie side by side: (n, n), of zeros and ones."""
    row, column = np.divmod(np.arange(n), n // rows)
    away = np.abs(row[:, None] - row) + np.abs(column[:, None] - column)
    return (away == 1).astype(float)


def potts(cost: Floats, rows: int, beta: float, labels: Integers) -> float:
    """``sum_k c[z_k, k] + beta * #{neighbours k, k' : z_k != z_k'}``.

    Args:
        cost: ``c``, (m, n): of each label in each of n blocks.
        rows: of the grid.
        beta: what a border between two blocks costs.
        labels: ``z``, (n,).
    """
    borders = (neighbours(len(labels), rows) * (labels[:, None] != labels)).sum() / 2
    return float(cost[labels, np.arange(len(labels))].sum() + beta * borders)


def least(cost: Floats, rows: int, beta: float) -> Integers:
    """A labelling that no expansion of a label betters, from the cheapest label of each block on: (n,).

    An expansion lets any set of blocks change to one label; the best set is found exactly (Boykov, Veksler & Zabih 2001), and
    of all labels that which betters most goes first. With two labels, or ``beta`` 0, the labelling is the best one; with more
    its energy is at most twice the least, where costs are not negative.

    Args:
        cost: ``c``, (m, n), as for :func:`potts`.
        rows: of the grid.
        beta: >= 0.
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
    """The label whose best expansion lowers the energy most, which blocks have it then, (n,), and by how much it does."""
    at = np.arange(len(labels))
    beside = neighbours(len(labels), rows)
    alike = beside * (labels[:, None] == labels)
    # f(S), of the blocks S that come to a label: the sum of own, less that of pull over pairs of blocks that then have it
    pull = beta * (beside + alike)
    own = cost - cost[labels, at] + beta * alike.sum(axis=1)
    has = labels == np.arange(len(cost))[:, None]
    # the least minimiser lies between two sets: blocks that come even beside none, and those that come beside all at best
    low, high = has.copy(), np.ones_like(has)
    while True:
        lower = low | (high & (own - low @ pull < -_GAIN))
        higher = has | (high & (own - high @ pull < -_GAIN))
        if (lower == low).all() and (higher == high).all():
            break
        low, high = lower, higher
    between = high & ~low
    gain = _gain(low, has, own, pull)
    # beyond low no set gains more than by those that lose alone and with half of what draws them to each other
    alone = own - low @ pull - between @ pull / 2
    most = gain - np.where(between, np.minimum(alone, 0.0), 0.0).sum(axis=1)
    open_to = np.flatnonzero(between.any(axis=1) & (most > max(gain.max(), _GAIN)))
    if len(open_to):
        low[open_to] = _cheapest(own[open_to], has[open_to], pull, rows)
        gain[open_to] = _gain(low[open_to], has[open_to], own[open_to], pull)
    best = int(gain.argmax())
    return best, low[best], float(gain[best])


def _gain(held: Bools, has: Bools, own: Floats, pull: Floats) -> Floats:
    """By how much the energy falls where the blocks ``held`` have a label, and those that ``has`` says have it now: (m,)."""
    comes = held & ~has
    return ((0.5 * comes + has) @ pull * comes - own * comes).sum(axis=1)


def _cheapest(own: Floats, has: Bools, pull: Floats, rows: int) -> Bools:
    """For each label the sets of least ``f``, that hold what has it: (m, n). Block after block, by what the last row holds."""
    m, n = own.shape
    width = n // rows
    states = np.arange(2 ** (width - 1))  # which of the last blocks are in: the last one is the lowest bit
    left = (states & 1 if width > 1 else np.zeros_like(states)).astype(float)
    value = np.full((m, 2, len(states)), np.inf)  # the highest bit, the block above, apart
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
    """What the terms of :func:`energy` weigh, for grids of any size.

    Attributes:
        beta: of borders between blocks of one grid that are of two inputs, each ``beta / n`` for n blocks.
        gamma: of blocks of one input in two grids, each ``gamma / n``.
        tau: how many grids' worth of blocks of one input the other grids may have before that counts.
    """

    beta: float
    gamma: float
    tau: float

    def penalty(self, cost: Floats, compatible: Floats, taken: Floats) -> Floats:
        """``gamma / n * h(A t)`` with ``h(x) = x`` where ``x > tau n``, and 0 elsewhere: of ``t`` blocks taken, (..., m)."""
        n = cost.shape[1]
        much = taken @ compatible
        return self.gamma / n * np.where(much > self.tau * n, much, 0.0)


def counts(grids: Integers, inputs: int) -> Floats:
    """``o_j``: how many blocks of each grid are of each input, (m', m), of grids (m', n)."""
    return (grids[:, :, None] == np.arange(inputs)).sum(axis=1).astype(float)


def energy(grids: Integers, cost: Floats, rows: int, compatible: Floats, weights: Weights) -> float:
    """``sum_j [ sum_k c[z_jk, k] + beta / n * #borders_j + gamma / n * o_j . h(A sum_{i != j} o_i) ]``.

    Args:
        grids: ``z``, (m', n): the input that each block of each grid is of.
        cost: ``c``, (m, n).
        rows: of each grid.
        compatible: ``A``, (m, m), symmetric: what a block of one input costs beside one of another in another grid.
        weights: ``beta``, ``gamma`` and ``tau``.
    """
    own = counts(grids, len(cost))
    apart = weights.penalty(cost, compatible, own.sum(axis=0) - own)
    smooth = sum(potts(cost, rows, weights.beta / cost.shape[1], z) for z in grids)
    return float(smooth + (apart * own).sum())


def together(
    cost: Floats, rows: int, compatible: Floats, weights: Weights, start: Integers, iterations: int
) -> Integers:
    """Grids of little :func:`energy`: each in turn the best beside the others as they are, some times over. (m', n).

    A grid ``z_j`` beside the others minimises ``c + 2 gamma / n * h(A sum_{i != j} o_i)`` with its borders: the derivative of
    what couples the grids, which is supermodular, stands for it. Kept is what of all iterations has the least energy, or what
    has the cheapest input in each block, if that has less.

    Args:
        cost: ``c``, (m, n).
        rows: of each grid.
        compatible: ``A``, as for :func:`energy`.
        weights: ``beta``, ``gamma`` and ``tau``.
        start: the first grids, (m', n).
        iterations: how often each grid is made anew, at most.
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
