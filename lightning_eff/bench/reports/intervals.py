"""Intervals over seeds: a paired bootstrap of the mean, expanded for few seeds (Hesterberg 2015, arXiv:1411.5279)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from random import Random
from statistics import NormalDist, median


@dataclass(frozen=True)
class Interval:
    """An estimate between two bounds.

    Args:
        estimate: the mean, or the geometric mean of ratios.
        low: the lower bound.
        high: the upper bound.
        n: how many pairs (seeds or calibration blocks) it rests on.
    """

    estimate: float
    low: float
    high: float
    n: int

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside; the bounds themselves count as inside."""
        return value < self.low or value > self.high


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution.

    Args:
        probability: in (0, 1).
        degrees: degrees of freedom, >= 1.

    Raises:
        ModuleNotFoundError: scipy is not installed.
        ValueError: for other numbers.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"t_quantile({probability=}, {degrees=}): expected a probability in (0, 1) and degrees >= 1.")
    try:
        from scipy.special import stdtrit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'The bench tells differences by scipy, which is not installed. Install it: pip install "lightning-eff[bench]"',
            name=error.name,
        ) from error
    return float(stdtrit(degrees, probability))


def percentile_bounds(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000) -> tuple[float, float]:
    """Bounds of the mean by the plain percentile bootstrap.

    All distinct resamples are counted out, each with its probability, where that takes no more than ``resamples``
    (up to 8 values at 10,000); otherwise ``resamples`` are drawn, always the same ones. It is too narrow for few
    values: at three it covers the true mean about three times in four. :func:`paired_interval` mends that.

    Args:
        values: at least one.
        level: coverage that is aimed at, in (0, 1).
        resamples: how many resamples to draw, >= 1.
    """
    n = len(values)
    if not n or not 0 < level < 1 or resamples < 1:
        raise ValueError(
            f"percentile_bounds({n} values, {level=}, {resamples=}): expected values, a level in (0, 1), resamples >= 1."
        )
    if math.comb(2 * n - 1, n) <= resamples:
        whole = math.factorial(n)
        weighted = []
        for drawn in combinations_with_replacement(range(n), n):
            ways = whole
            for index in set(drawn):
                ways //= math.factorial(drawn.count(index))
            weighted.append((math.fsum(values[index] for index in drawn) / n, ways / n**n))
    else:
        generator = Random(0)
        weighted = [(math.fsum(generator.choices(values, k=n)) / n, 1 / resamples) for _ in range(resamples)]
    weighted.sort()
    tail = (1 - level) / 2
    return _quantile(weighted, tail), _quantile(weighted[::-1], tail)


def _quantile(weighted: list[tuple[float, float]], tail: float) -> float:
    """The first value, from the list's start, at which the weight of ``tail`` is reached."""
    total = 0.0
    for value, weight in weighted:
        total += weight
        if total >= tail:
            return value
    return weighted[-1][0]


def paired_interval(differences: Sequence[float], *, level: float = 0.95, resamples: int = 10_000) -> Interval | None:
    """Interval of the mean of paired differences, or None for fewer than two of them.

    The percentile bootstrap's bounds, each moved away from the mean by

        t_{n−1, 1−α/2} / z_{1−α/2} · √(n / (n − 1)),

    since the bootstrap knows neither that the spread is estimated nor that it divides by n.

    Args:
        differences: one number a seed, finite.
        level: coverage that is aimed at, in (0, 1).
        resamples: see :func:`percentile_bounds`.
    """
    n = len(differences)
    bad = [value for value in differences if not math.isfinite(value)]
    if bad:
        raise ValueError(
            f"paired_interval: got {bad[0]} among the differences; leave out the runs that did not finish."
        )
    if n < 2:
        return None
    mean = math.fsum(differences) / n
    low, high = percentile_bounds(differences, level=level, resamples=resamples)
    upper = (1 + level) / 2
    stretch = t_quantile(upper, n - 1) / NormalDist().inv_cdf(upper) * math.sqrt(n / (n - 1))
    return Interval(mean, mean - stretch * (mean - low), mean + stretch * (high - mean), n)


def ratio_interval(ratios: Sequence[float], *, level: float = 0.95, resamples: int = 10_000) -> Interval | None:
    """Interval of the geometric mean of positive ratios: :func:`paired_interval` on their logarithms."""
    bad = [value for value in ratios if not value > 0]
    if bad:
        raise ValueError(f"ratio_interval: got the ratio {bad[0]}; expected ratios > 0.")
    logs = paired_interval([math.log(value) for value in ratios], level=level, resamples=resamples)
    return logs and Interval(math.exp(logs.estimate), math.exp(logs.low), math.exp(logs.high), logs.n)


def paired_ratio(
    pairs: Sequence[tuple[float, float]], *, level: float = 0.95, resamples: int = 10_000
) -> Interval | None:
    """Interval of arm / baseline, from pairs (baseline, arm) of positive numbers; None for fewer than two pairs."""
    bad = [pair for pair in pairs if not (pair[0] > 0 and pair[1] > 0)]
    if bad:
        raise ValueError(f"paired_ratio: got the pair {tuple(bad[0])}; expected (baseline, arm), both > 0.")
    return ratio_interval([arm / baseline for baseline, arm in pairs], level=level, resamples=resamples)


def signed_rank_interval(values: Sequence[float], *, level: float = 0.95) -> Interval | None:
    """Interval of the centre of symmetric values by Wilcoxon's signed ranks, with Hodges and Lehmann's estimate.

    The estimate is the median of the Walsh averages ``(v_i + v_j) / 2``, ``i <= j``; the interval runs from the k-th
    smallest of them to the k-th largest, with the largest k whose exact coverage is at least ``level``. A single wild
    value moves neither far, as it would a mean. Fewer than 6 values have no such interval at 95 %: for them this is
    :func:`paired_interval`.

    Args:
        values: differences, one for each round; independent, symmetric about their centre.
        level: coverage, in (0, 1).
    """
    n = len(values)
    counts = [1] + [0] * (n * (n + 1) // 2)  # how many sets of ranks 1..n sum to each rank sum
    for rank in range(1, n + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    below, k = 0, 0
    while k < len(counts) and 2 * (below + counts[k]) <= (1 - level) * 2**n:
        below += counts[k]
        k += 1
    if k == 0:
        return paired_interval(values, level=level)
    walsh = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    return Interval(median(walsh), walsh[k - 1], walsh[-k], n)


def speed_ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The ratio of speeds, arm by baseline, from pairs ``(baseline, arm)`` measured side by side on a busy machine."""
    interval = signed_rank_interval([math.log(arm / baseline) for baseline, arm in pairs])
    if interval is None:
        return None
    return Interval(math.exp(interval.estimate), math.exp(interval.low), math.exp(interval.high), interval.n)
