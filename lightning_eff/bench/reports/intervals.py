"""Intervals over seeds or rounds: Student's t on paired differences."""

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
        raise ModuleNotFoundError(missing("Benchmark", "scipy", "bench"), name=error.name) from error
    return float(stdtrit(degrees, probability))


def paired_interval(differences: Sequence[float], *, level: float = 0.95) -> Interval | None:
    """Interval of the mean of paired differences, or None for fewer than two of them.

        mean ± t_{n−1, (1+level)/2} · s / √n

    with their deviation ``s``. It covers the mean of normal differences at ``level`` exactly, and that of differences with
    wild values among them more often than that, since those widen it.

    Args:
        differences: one number a seed or round, finite.
        level: coverage that is aimed at, in (0, 1).
    """
    n = len(differences)
    if bad := [value for value in differences if not math.isfinite(value)]:
        raise ValueError(
            f"paired_interval: got {bad[0]} among the differences; leave out the runs that did not finish."
        )
    if n < 2:
        return None
    mean = math.fsum(differences) / n
    half = t_quantile((1 + level) / 2, n - 1) * stdev(differences) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Interval of the geometric mean of arm / baseline: :func:`paired_interval` on the logarithms.

    Args:
        pairs: (baseline, arm), positive; fewer than two give None.
    """
    if bad := [pair for pair in pairs if not (pair[0] > 0 and pair[1] > 0)]:
        raise ValueError(f"paired_ratio: got the pair {tuple(bad[0])}; expected (baseline, arm), both > 0.")
    logs = paired_interval([math.log(arm / baseline) for baseline, arm in pairs])
    return logs and Interval(math.exp(logs.estimate), math.exp(logs.low), math.exp(logs.high), logs.n)
