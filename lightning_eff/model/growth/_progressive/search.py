"""The candidates of a search, and the rule that chooses one of them."""

import math
from collections.abc import Mapping, Sequence

Candidate = tuple[int, float]  # the number of blocks, and the fraction of the full resolution

_TIE = 1e-9  # scores that differ by less are equal, because a line through two points leaves only rounding errors


def ladder(low: float, steps: int) -> list[float]:
    """Return ``steps`` fractions at equal distances from ``low`` to 1."""
    return [low + (1.0 - low) * i / (steps - 1) for i in range(steps)]


def rung(num_blocks: int, share: float) -> int:
    """Return the number of blocks nearest to the fraction ``share`` of them, at least one."""
    return max(int(share * num_blocks + 0.5), 1)


def rungs(num_blocks: int, low: float, steps: int) -> list[int]:
    """Return :func:`ladder` in numbers of blocks, each number once."""
    return sorted({rung(num_blocks, share) for share in ladder(low, steps)})


def candidates_of(
    depths: Sequence[int], shares: Sequence[float], now: Candidate | None
) -> tuple[list[int], list[float]]:
    """Return the depths and resolutions from which a stage chooses.

    The first stage takes the smallest, the middle and the largest of both. Later ones take up to three depths, from the
    next one on, and up to two resolutions, from the current one on.

    Args:
        depths: all depths of the run, growing.
        shares: all of its resolutions, growing.
        now: the sub-network of the stage before; None in the first.
    """
    if now is None:
        ends = [sorted({0, len(steps) // 2, len(steps) - 1}) for steps in (depths, shares)]
        return [depths[i] for i in ends[0]], [shares[i] for i in ends[1]]
    at = min(depths.index(now[0]) + 1, len(depths) - 1)
    r = shares.index(now[1])
    return [*depths[at : at + 3]], [*shares[r : r + 2]]


def balance(losses: Mapping[Candidate, float], times: Mapping[Candidate, float], before: float | None) -> float:
    """Fit ``log L = a + b log T`` to the candidates' losses and times by least squares, and return ``alpha = max(-b, 0)``.

    Two times determine the line, so it says nothing; then the result is ``before``, the last stage's value, if there is
    one. The result is 0 if a loss is not positive.
    """
    if min(losses.values()) <= 0.0:
        return 0.0
    if before is not None and len(set(times.values())) < 3:
        return before
    x = [math.log(times[c]) for c in losses]
    y = [math.log(loss) for loss in losses.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((v - mean_x) ** 2 for v in x)
    slope = sum((v - mean_x) * (w - mean_y) for v, w in zip(x, y, strict=True)) / spread if spread else 0.0
    return max(-slope, 0.0)


def best_of(losses: Mapping[Candidate, float], times: Mapping[Candidate, float], alpha: float) -> Candidate:
    """Return the candidate with the lowest ``L T^alpha``; among equal ones, the cheapest."""
    # psi* = argmin L(psi) T(psi)^alpha
    scores = {c: loss * times[c] ** alpha for c, loss in losses.items()}
    least = min(scores.values())
    equal = [c for c, score in scores.items() if score <= least + _TIE * abs(least)]
    return min(equal, key=lambda c: (times[c], c))
