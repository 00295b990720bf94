"""Regular patterns: of each ``period`` units that lie side by side, one is kept (Song et al. 2018, section 3)."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Pattern(NamedTuple):
    """Kept are the units ``first, first + period, first + 2 period, ...``; ``first`` lies in [0, period).

    A kept unit counts ``period`` times, so that for each period the mean over ``first`` is what all units give.
    """

    period: int
    first: int


def probabilities(rate: float, most: int) -> list[float]:
    """How likely each period from 1 to ``most`` is, for units to be dropped at ``rate`` on average.

    Of all distributions with ``sum_i d_i (1 - 1/i) = rate`` that of the largest entropy, ``-sum_i d_i log d_i``, so that
    patterns are many: ``d_i = exp(t (1 - 1/i)) / Z``. The source searches for it by gradients on both terms.

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
    """A period by its probability, and any of its places to begin."""
    numbers = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    period, above = len(likely), 0.0
    for i, p in enumerate(likely, start=1):
        above += p
        if numbers[0] < above:
            period = i
            break
    return Pattern(period, min(int(numbers[1] * period), period - 1))


def kept(tensor: Tensor, dim: int, groups: int, pattern: Pattern) -> Tensor:
    """The part of ``tensor`` of the kept units, which lie along ``dim``, ``groups`` times one after the other."""
    if groups == 1:
        return tensor[(slice(None),) * dim + (slice(pattern.first, None, pattern.period),)]
    apart = tensor.unflatten(dim, (groups, -1))
    return apart[(slice(None),) * (dim + 1) + (slice(pattern.first, None, pattern.period),)].flatten(dim, dim + 1)
