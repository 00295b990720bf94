"""Ratios of step times, paired by turns, and the rule that says whether a change keeps the numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from lightning_eff.bench.reports.intervals import Interval, paired_ratio

NARROW = 0.06  #: width of a ratio's interval, relative to the ratio, at which a trial has been measured enough
LEAST = 6  #: turns of a ratio
DISTURBED = 1.5  #: a turn that takes so many times the median of its run was disturbed
FEW = 0.2  #: the largest fraction of turns that may count as disturbed

#: How a change affects numbers, from best to worst.
EXACT, PRECISION, BATCHES = "exact", "rounding", "other batches"


@dataclass(frozen=True)
class Turn:
    """The time and size of a turn, without its first batches.

    Attributes:
        seconds: of all batches.
        samples: in them.
        tokens: in them without padding; 0 where samples are no sequences.
        batches: how many.
        queued: of ``seconds``, those in which this thread was ready to run and other processes had the core.
        workers: whether processes of the run's own loader competed for the cores.
    """

    seconds: float
    samples: int
    tokens: int
    batches: int
    queued: float = 0.0
    workers: bool = False

    def per(self, unit: str, *, alone: bool = False) -> float:
        """Seconds per sample, or per token where ``unit`` is "token" and there are any.

        Args:
            unit: what is counted.
            alone: without the time in which other processes had the core.
        """
        seconds = self.seconds - self.queued if alone else self.seconds
        return seconds / max((unit == "token" and self.tokens) or self.samples or self.batches, 1)


def speed_up(baseline: Sequence[Turn], trial: Sequence[Turn], unit: str = "sample") -> Interval | None:
    """How many times as fast as the baseline a trial is: Student's t on logarithms of ratios, paired by turn.

    The time in which other processes had the core does not count, unless a loader's own workers may have been these processes.
    A turn in which either run took over :data:`DISTURBED` times its own median is left out, unless there are many of them.
    """
    both = list(zip(baseline, trial, strict=False))
    alone = not any(one.workers for pair in both for one in pair)
    pairs = [(t.per(unit, alone=alone), b.per(unit, alone=alone)) for b, t in both]
    pairs = [pair for pair in pairs if pair[0] > 0 and pair[1] > 0]
    if len(pairs) > LEAST:
        typical = [median(values) for values in zip(*pairs, strict=True)]
        quiet = [p for p in pairs if all(v <= DISTURBED * m for v, m in zip(p, typical, strict=True))]
        if len(quiet) >= max(LEAST, (1 - FEW) * len(pairs)):
            pairs = quiet
    return paired_ratio(pairs)


def narrow(found: Interval | None) -> bool:
    """Whether an interval is narrow enough."""
    return found is not None and found.high - found.low <= NARROW * found.estimate


@dataclass(frozen=True)
class Numbers:
    """The first optimizer step of a run: its loss and gradients.

    Attributes:
        loss: of all micro-batches of the step; None where the run showed none.
        gradients: by name of the parameter.
    """

    loss: float | None
    gradients: dict[str, torch.Tensor]

    def differences(self, other: "Numbers") -> tuple[float, float]:
        """Relative differences of another step's loss and gradients from this one's; infinite where they do not compare."""
        if self.loss is None or other.loss is None:
            loss = 0.0 if self.loss is other.loss else math.inf
        else:
            loss = abs(other.loss - self.loss) / max(abs(self.loss), 1e-12) if other.loss != self.loss else 0.0
        if self.gradients.keys() != other.gradients.keys():
            return _finite(loss), math.inf
        apart = whole = 0.0
        for name, own in self.gradients.items():
            theirs = other.gradients[name]
            if theirs.shape != own.shape:
                return _finite(loss), math.inf
            apart += float((theirs.double() - own.double()).square().sum())
            whole += float(own.double().square().sum())
        return _finite(loss), _finite(math.sqrt(apart / whole) if whole > 0 else math.sqrt(apart))


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def tolerance(precision: str) -> float:
    """The largest relative difference of a gradient that counts as rounding, for a run's own precision.

    This is the one rule of what "exact" means: the same computation in the same precision, which may add in another order. A
    gradient in float32 may then differ by about 1e-4 in relative norm, and one in bfloat16 by a few of its roundings of 4e-3.
    """
    if precision.startswith("64"):
        return 1e-10
    return 3e-2 if "16" in precision or "8" in precision else 2e-4


def keeps_numbers(loss: float, gradients: float, precision: str, noise: float = 0.0) -> bool:
    """Whether these relative differences are rounding.

    Args:
        loss: of the loss.
        gradients: of the gradients, all together.
        precision: of the run.
        noise: the difference between two runs of the baseline.
    """
    return max(loss, gradients) <= max(tolerance(precision), 3 * noise)
