"""Confidence intervals over seeds or rounds, by Student's t on paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from lightning_eff._core._lightning.extras import missing


@dataclass(frozen=True)
class Interval:
    """An estimate between two bounds.

    Args:
        estimate: the mean, or the geometric mean of ratios.
        low: the lower bound.
        high: the upper bound.
        n: the number of pairs (seeds or rehearsal rounds).
    """

    estimate: float
    low: float
    high: float
    n: int

    def excludes(self, value: float) -> bool:
        """Return whether ``value`` lies outside; the bounds count as inside."""
        return value < self.low or value > self.high


def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution.

    Args:
        probability: in (0, 1).
        degrees: degrees of freedom, >= 1.

    Raises:
        ModuleNotFoundError: if scipy is not installed.
        ValueError: for a number out of range.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"t_quantile({probability=}, {degrees=}): expected a probability in (0, 1) and degrees >= 1.")
    try:
        from scipy.special import stdtrit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("Benchmark", "scipy", "bench"), name=error.name) from error
    return float(stdtrit(degrees, probability))


def paired_interval(differences: Sequence[float], *, level: float = 0.95) -> Interval | None:
    """Return the interval of the mean of paired differences, or None for fewer than two.

        mean ± t_{n−1, (1+level)/2} · s / √n

    where s is their standard deviation. The coverage is exact for normal differences. It is higher for differences with
    outliers, which widen the interval.

    Args:
        differences: one finite number per seed or round.
        level: the coverage, in (0, 1).
    """
    n = len(differences)
    if bad := [value for value in differences if not math.isfinite(value)]:
        raise ValueError(f"paired_interval(differences=...): got {bad[0]}. Leave out the runs that did not finish.")
    if n < 2:
        return None
    mean = math.fsum(differences) / n
    half = t_quantile((1 + level) / 2, n - 1) * stdev(differences) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Return the interval of the geometric mean of arm / baseline, by :func:`paired_interval` on logarithms.

    Args:
        pairs: (baseline, arm), both positive. Fewer than two give None.
    """
    if bad := [pair for pair in pairs if not (pair[0] > 0 and pair[1] > 0)]:
        raise ValueError(f"paired_ratio(pairs=...): got {tuple(bad[0])}, expected (baseline, arm) with both > 0.")
    logs = paired_interval([math.log(arm / baseline) for baseline, arm in pairs])
    return logs and Interval(math.exp(logs.estimate), math.exp(logs.low), math.exp(logs.high), logs.n)
