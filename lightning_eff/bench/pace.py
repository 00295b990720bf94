"""How a run of a benchmark is to be paced, and what can end it."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

SCHEDULES = ("own", "linear", "cosine")
_UNITS = {"rs": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_MAXIMISED = re.compile(  # a metric's name, or a part of it between other signs than letters
    r"accuracy|auroc|(^|[^a-z])(acc|top|f|f1_?score|auc|ap|map|precision|recall|sensitivity|specificity|bleu|rouge\w*|meteor"
    r"|iou|miou|jaccard|dice|score|psnr|ssim|r2|r_2|r_squared|kappa|mcc|corr|correlation|pearson|spearman|ndcg|mrr|hits?"
    r"|reward|return|elbo|em|exact_match)(?![a-z])"
)
WARM_UP = 0.05  # of the budget, where the bench lays out the schedule itself


def mode_of(target: str) -> Literal["min", "max"]:
    """Whether less or more of a metric is better, told by its name."""
    return "max" if _MAXIMISED.search(target.lower()) else "min"


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
        common: kinds of steps that the baseline makes too. What the first step of such a kind takes beyond its price is
            set-up, as it is in an arm's first optimizer step; that of any other kind (growth, recompilation) is the arm's
            own doing and counts against its budget.
        steps: how many optimizer steps the learning-rate schedule is laid out for.
        evaluations: how many times to validate, evenly over the budget, the last time at its end.
        schedule: "own", the module's; "linear" or "cosine", the bench's in its place, after a warm-up of 5 %.
        rate: the learning rate at the schedule's peak, of the parameter group with the largest; None leaves the module's.
        warm_up: the share of the budget at which the peak is reached; None leaves the schedule's.
        sweep: in place of the budget, so many optimizer steps that pass through the whole schedule (a rehearsal).
        inspect: whether to inspect the data, and to validate at the end of a sweep.
        check_target: whether to validate one batch at the end of a sweep, to see whether it logs the target.
        watch: hold the samples that it trains on against those of validation, and its weights before a validation against
            those after it.
        blind: let validation have one sample alone, so that what a run takes from validation data shows.
        keep: a file into which the weights are written that validation is given.
        take: a file of weights that are validated in place of its own.
    """

    target: str
    budget: float = math.inf
    reference: bool = False
    prices: Mapping[str, float] = field(default_factory=dict)
    common: Sequence[str] = ()
    steps: int = 1
    evaluations: int = 1
    schedule: str = "own"
    rate: float | None = None
    warm_up: float | None = None
    sweep: int | None = None
    inspect: bool = False
    check_target: bool = False
    watch: bool = False
    blind: bool = False
    keep: str | None = None
    take: str | None = None


def decay(schedule: str, u: float, warm_up: float = WARM_UP) -> float:
    """The bench's own schedules as a factor of the base rate, at the share ``u`` of the budget: 0 at ``u = 1``."""
    if u < warm_up:
        return max(u, 1e-3) / warm_up
    v = (u - warm_up) / (1 - warm_up)
    return 1 - v if schedule == "linear" else (1 + math.cos(math.pi * v)) / 2


def _amount(text: object, units: str) -> tuple[float, str | None]:
    """The number in ``text`` and which of ``units`` (joined by ``|``) follows it, if any; -1 where it is none."""
    found = re.fullmatch(rf"\s*([0-9.]+(?:e-?[0-9]+)?)\s*({units})?\s*", str(text))
    if found is not None:
        with suppress(ValueError):  # such as 1.2.3
            return float(found[1]), found[2]
    return -1.0, None


def warm_up_share(text: str | float, seconds: float) -> float:
    """A warm-up of ``"5s"`` (or rs, m, h) or ``"5%"`` or 0.05 of a budget, as a share of ``seconds``.

    Raises:
        ValueError: for anything else, or more than half of the budget.
    """
    value, unit = _amount(text, "rs|s|min|m|h|%")
    share = value / 100 if unit == "%" else value if unit is None else value * _UNITS[unit] / seconds
    if 0 <= share <= 0.5:
        return share
    raise ValueError(
        f"Got warm-up {text!r}; expected seconds ('5s', '1m') or a share ('5%', 0.05) of the budget of {seconds:g} s, at"
        " most half of it."
    )


@dataclass(frozen=True)
class Budget:
    """Training seconds, by wall-clock or in reference-system time."""

    seconds: float
    clock: Literal["wall", "reference"]

    @classmethod
    def parse(cls, text: "str | float | Budget") -> "Budget":
        """``"120s"``, ``"2m"``, ``"1h"`` of wall-clock, ``"120rs"`` of reference-system time; a Python number is seconds.

        Raises:
            ValueError: for anything else, less than nothing, or a text without a unit.
        """
        if isinstance(text, Budget):
            return text
        value, unit = _amount(text, "rs|s|min|m|h")
        if unit is None and isinstance(text, str) and 0 < value < math.inf:
            raise ValueError(
                f"Got budget {text!r} without a unit. Write '{text.strip()}s' for seconds, '{text.strip()}m' for minutes or"
                f" '{text.strip()}h' for hours."
            )
        seconds = value * _UNITS[unit or "s"]
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"Got budget {text!r}; expected training seconds above 0: '120s' (or '2m', '1h') of wall-clock, or"
                " '120rs' of reference-system time, in which each step costs the calibrated time of its kind."
            )
        return cls(seconds, "reference" if unit == "rs" else "wall")
