"""Learning rate shapes: ``eta(u) / eta_max`` at the fraction ``u`` of the budget, each as in its paper."""

import math
from collections.abc import Callable
from dataclasses import dataclass


def linear(v: float) -> float:
    """``1 - v`` (Li et al. 2019, arXiv:1905.04753; to zero, Bergsma et al. 2025, arXiv:2502.15938)."""
    return 1.0 - v


def cosine(v: float) -> float:
    """``(1 + cos(pi v)) / 2`` (Loshchilov & Hutter 2016, arXiv:1608.03983)."""
    return 0.5 * (1.0 + math.cos(math.pi * v))


def rex(v: float) -> float:
    """``(1 - v) / (1/2 + (1 - v) / 2)`` (Chen et al. 2021, arXiv:2107.04197), which is 2/3 halfway."""
    return (1.0 - v) / (0.5 + 0.5 * (1.0 - v))


def esd(v: float) -> float:
    """``2^-k`` on ``[1 - r^k, 1 - r^(k+1))`` with ``r = 1 / sqrt(2)``: elastic steps (Pan et al. 2021, arXiv:2110.14109)."""
    if v >= 1.0:
        return 0.0
    # 1 - v <= r^k; the small number guards the ends of intervals against rounding
    return 2.0 ** -math.floor(-2.0 * math.log2(1.0 - v) + 1e-9)


def trapezoid(v: float, decay: float, shape: Callable[[float], float]) -> float:
    """1 until ``1 - decay``, then ``shape`` (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395)."""
    return 1.0 if v <= 1.0 - decay or not decay else shape((v - (1.0 - decay)) / decay)


def triangles(v: float, cycles: int) -> float:
    """Rise from 0 to 1 and fall back ``cycles`` times, with the peak in mid-cycle (CLR; Smith 2015, arXiv:1506.01186)."""
    within = (v * cycles) % 1.0 if v < 1.0 else 1.0
    return 1.0 - abs(2.0 * within - 1.0)


def restarts(v: float, cycles: int, growth: float) -> float:
    """Repeat cosines from 1 to 0, each ``growth`` times as long (SGDR; Loshchilov & Hutter 2016, arXiv:1608.03983)."""
    lengths = [growth**i for i in range(cycles)]
    start, total = 0.0, sum(lengths)
    for length in lengths:
        end = start + length / total
        if v < end - 1e-12:
            return cosine((v - start) / (end - start))
        start = end
    return 0.0


def one_cycle(u: float, peak: float, start: float, final: float, ramp: Callable[[float], float]) -> float:
    """Rise from ``start`` to 1 at ``peak``, then fall to ``final`` (Smith & Topin 2017, arXiv:1708.07120).

    Args:
        u: the fraction of the budget, in [0, 1].
        peak: the fraction at which the value is 1, in (0, 1).
        start: the value at 0.
        final: the value at 1.
        ramp: a function that falls from 1 to 0 over [0, 1].
    """
    if u <= peak:
        return 1.0 + (start - 1.0) * ramp(u / peak)
    return final + (1.0 - final) * ramp((u - peak) / (1.0 - peak))


RAMPS: dict[str, Callable[[float], float]] = {"cosine": cosine, "linear": linear}
SHAPES = ("linear", "cosine", "rex", "esd", "one_cycle", "clr", "sgdr", "wsd", "constant")


@dataclass(frozen=True)
class Shape:
    """A shape with its settings, which :class:`LearningRateSchedule` describes."""

    name: str
    warmup: float
    start: float
    final: float
    peak: float
    ramp: str
    decay: float
    cycles: int
    cycle_growth: float

    def __call__(self, u: float) -> float:
        """Return ``eta(u) / eta_max``."""
        if self.name == "one_cycle":
            return one_cycle(u, self.peak, self.start, self.final, RAMPS[self.ramp])
        if u < self.warmup:
            # warm-up ends where the shape begins
            return self.start + (self._after(0.0) - self.start) * u / self.warmup
        return self._after((u - self.warmup) / (1.0 - self.warmup))

    def _after(self, v: float) -> float:
        if self.name == "constant":
            return 1.0
        if self.name == "esd":
            return max(esd(v), self.final)
        falling = {
            "linear": lambda: linear(v),
            "cosine": lambda: cosine(v),
            "rex": lambda: rex(v),
            "wsd": lambda: trapezoid(v, self.decay, RAMPS[self.ramp]),
            "clr": lambda: triangles(v, self.cycles),
            "sgdr": lambda: restarts(v, self.cycles, self.cycle_growth),
        }[self.name]()
        return self.final + (1.0 - self.final) * falling

    def momentum(self, u: float, low: float, high: float) -> float:
        """Return one cycle's momentum: it falls from ``high`` to ``low`` at the highest learning rate, and rises again."""
        ramp = RAMPS[self.ramp]
        if u <= self.peak:
            return low + (high - low) * ramp(u / self.peak)
        return high + (low - high) * ramp((u - self.peak) / (1.0 - self.peak))
