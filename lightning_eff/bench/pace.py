"""How a run of a benchmark is to be paced, and what can end it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SCHEDULES = ("own", "linear", "cosine")
_UNITS = {"rs": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
WARM_UP = 0.05  # of the budget, where the bench lays out the schedule itself


class Horizon(int):
    """A number of steps or epochs for which schedules are laid out, and at which Lightning does not stop.

    Lightning stops where ``done >= limit``, which Python asks the limit first, as it is of the more special class.
    """

    def __le__(self, other: object) -> bool:
        return False


class Incomparable(ValueError):
    """Two arms cannot be compared, or this one cannot be measured."""


class Diverged(RuntimeError):
    """The loss or the metric became nan or infinite."""


class Rehearsed(Exception):
    """A rehearsal is over: what a module does as a fit ends, such as writing samples, is left out."""


@dataclass(frozen=True)
class Pace:
    """How a run is to be paced.

    Attributes:
        target: the validation metric.
        budget: training seconds, on the clock that ``reference`` names.
        reference: charge each step the calibrated price of its kind; else its wall-clock time.
        prices: seconds by kind of step.
        steps: how many optimizer steps the learning-rate schedule is laid out for.
        evaluations: how many times to validate, evenly over the budget, the last time at its end.
        schedule: "own", the module's; "linear" or "cosine", the bench's in its place, after a warm-up of 5 %.
        sweep: in place of the budget, so many optimizer steps that pass through the whole schedule (a rehearsal).
        inspect: look at the data, and validate at the end of a sweep.
    """

    target: str
    budget: float = math.inf
    reference: bool = False
    prices: Mapping[str, float] = field(default_factory=dict)
    steps: int = 1
    evaluations: int = 1
    schedule: str = "own"
    sweep: int | None = None
    inspect: bool = False


def decay(schedule: str, u: float) -> float:
    """The bench's own schedules as a factor of the base rate, at the share ``u`` of the budget: 0 at ``u = 1``."""
    if u < WARM_UP:
        return max(u, 1e-3) / WARM_UP
    v = (u - WARM_UP) / (1 - WARM_UP)
    return 1 - v if schedule == "linear" else (1 + math.cos(math.pi * v)) / 2


@dataclass(frozen=True)
class Budget:
    """Training seconds, by wall-clock or in reference-system time."""

    seconds: float
    clock: Literal["wall", "reference"]

    @classmethod
    def parse(cls, text: "str | float | Budget") -> "Budget":
        """``"120s"``, ``"2m"``, ``"1h"`` of wall-clock, ``"120rs"`` of reference-system time; a number is seconds.

        Raises:
            ValueError: for anything else, or less than nothing.
        """
        if isinstance(text, Budget):
            return text
        found = re.fullmatch(r"\s*([0-9.]+)\s*(rs|s|min|m|h)?\s*", str(text))
        try:
            seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
        except ValueError:
            seconds = 0.0
        if not found or not seconds > 0:
            raise ValueError(
                f"Got budget {text!r}; expected training seconds above 0: '120s' (or '2m', '1h') of wall-clock, or"
                " '120rs' of reference-system time, in which each step costs the calibrated time of its kind."
            )
        return cls(seconds, "reference" if found[2] == "rs" else "wall")
