"""Which sub-network trains best for what it costs: candidates, and the rule that chooses one of them."""

import math
from collections.abc import Mapping, Sequence

Candidate = tuple[int, float]  # how many blocks, and the share of the full resolution

_TIE = 1e-9  # scores that differ by less are equal: a curve through two points leaves nothing but rounding


def ladder(low: float, steps: int) -> list[float]:
    """``steps`` shares at equal distances from ``low`` to 1."""
    return [low + (1.0 - low) * i / (steps - 1) for i in range(steps)]


def rung(num_blocks: int, share: float) -> int:
    """The number of blocks nearest to ``share`` of them, at least one."""
    return max(int(share * num_blocks + 0.5), 1)


def rungs(num_blocks: int, low: float, steps: int) -> list[int]:
    """:func:`ladder` in blocks, each number once."""
    return sorted({rung(num_blocks, share) for share in ladder(low, steps)})


def candidates_of(
    depths: Sequence[int], shares: Sequence[float], now: Candidate | None
) -> tuple[list[int], list[float]]:
    """The depths and resolutions that a stage chooses from.

    First the smallest, the middle one and the largest of both; later up to three depths, from the next one on, and up to two
    resolutions, from that at hand on.

    Args:
        depths: all that a run takes, growing.
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
    """``alpha = max(-b, 0)``, of the line ``log L = a + b log T`` through the candidates' losses and times, by least squares.

    Two times determine the line, which then says nothing: ``before``, the last stage's, is taken there if there is one. It is
    0 where a loss is not above 0.
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
    """The candidate with the least ``L T^alpha``; of those that are equal, the one that costs least."""
    # psi* = argmin L(psi) T(psi)^alpha
    scores = {c: loss * times[c] ** alpha for c, loss in losses.items()}
    least = min(scores.values())
    equal = [c for c, score in scores.items() if score <= least + _TIE * abs(least)]
    return min(equal, key=lambda c: (times[c], c))
