"""Regular patterns that keep one of every ``period`` neighbouring units (Song et al. 2018, section 3)."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Pattern(NamedTuple):
    """Keep the units ``first, first + period, first + 2 period, ...``; ``first`` is in [0, period).

    A kept unit counts ``period`` times, so the mean over ``first`` equals the result of all units, for each period.
    """

    period: int
    first: int


def probabilities(rate: float, most: int) -> list[float]:
    """The probability of each period from 1 to ``most`` that drops a fraction ``rate`` of the units on average.

    Of all distributions with ``sum_i d_i (1 - 1/i) = rate``, take the one with the largest entropy ``-sum_i d_i log d_i``, so
    that patterns vary: ``d_i = exp(t (1 - 1/i)) / Z``. The paper searches for it with gradients on both terms.

    Args:
        rate: in [0, 1 - 1 / most].
        most: N, the longest period, >= 1.
    """
    dropped = [1.0 - 1.0 / i for i in range(1, most + 1)]
    if rate <= 0.0 or rate >= dropped[-1]:
        return [float(i == (most if rate > 0.0 else 1)) for i in range(1, most + 1)]

    def at(t: float) -> list[float]:
        highest = max(t * p for p in dropped)
        weights = [math.exp(t * p - highest) for p in dropped]
        return [w / sum(weights) for w in weights]

    low, high = -1e4, 1e4
    for _ in range(200):
        t = (low + high) / 2
        mean = sum(d * p for d, p in zip(at(t), dropped, strict=True))
        low, high = (t, high) if mean < rate else (low, t)
    return at((low + high) / 2)


def draw(likely: list[float], generator: Generator) -> Pattern:
    """Draw a period by its probability, and its first unit uniformly."""
    numbers = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    period, above = len(likely), 0.0
    for i, p in enumerate(likely, start=1):
        above += p
        if numbers[0] < above:
            period = i
            break
    return Pattern(period, min(int(numbers[1] * period), period - 1))


def kept(tensor: Tensor, dim: int, groups: int, pattern: Pattern) -> Tensor:
    """The part of ``tensor`` that belongs to the kept units; these run along ``dim``, repeated ``groups`` times."""
    if groups == 1:
        return tensor[(slice(None),) * dim + (slice(pattern.first, None, pattern.period),)]
    apart = tensor.unflatten(dim, (groups, -1))
    return apart[(slice(None),) * (dim + 1) + (slice(pattern.first, None, pattern.period),)].flatten(dim, dim + 1)
