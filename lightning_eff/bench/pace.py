"""The pace of a benchmark run, and the exceptions that end it."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

SCHEDULES = ("own", "linear", "cosine")
_UNITS = {"rs": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_MAXIMISED = re.compile(  # a metric's name, or a part of it between characters other than letters
    r"accuracy|auroc|(^|[^a-z])(acc|top|f|f1_?score|auc|ap|map|precision|recall|sensitivity|specificity|bleu|rouge\w*|meteor"
    r"|iou|miou|jaccard|dice|score|psnr|ssim|r2|r_2|r_squared|kappa|mcc|corr|correlation|pearson|spearman|ndcg|mrr|hits?"
    r"|reward|return|elbo|em|exact_match)(?![a-z])"
)
WARM_UP = 0.05  # the warm-up of the bench's own schedules, as a fraction of the budget


def mode_of(target: str) -> Literal["min", "max"]:
    """Return whether a lower or a higher value of a metric is better, by its name."""
    return "max" if _MAXIMISED.search(target.lower()) else "min"


class Horizon(int):
    """A number of steps or epochs for schedules, at which Lightning does not stop.

    Lightning stops if ``done >= limit``. Python asks the limit first, because its class is a subclass of int.
    """

    def __le__(self, other: object) -> bool:
        return False


class Incomparable(ValueError):
    """Two arms cannot be compared, or one cannot be measured."""


class Diverged(RuntimeError):
    """The loss or the metric became nan or infinite."""


class Rehearsed(Exception):
    """A rehearsal is over. It skips the end of the fit, at which modules may write samples."""


@dataclass(frozen=True)
class Pace:
    """The pace of a run.

    Attributes:
        target: the validation metric.
        budget: the training seconds.
        reference: whether each step is charged the calibrated cost of its kind instead of its wall-clock time.
        prices: the seconds per step, by kind of step.
        common: the kinds of steps that the baseline has too. Excess time in the first step of such a kind is set-up, as in an
            arm's first optimizer step. For other kinds (growth, recompilation) it counts against the arm's budget.
        steps: the number of optimizer steps of the learning rate schedule.
        evaluations: the number of validations, evenly spaced, the last one at the end of the budget.
        schedule: "own" for the module's; "linear" or "cosine" for the bench's, with a warm-up of 5 %.
        rate: the peak learning rate of the parameter group with the largest; None keeps the module's.
        warm_up: the fraction of the budget at which the peak is reached; None keeps the schedule's.
        sweep: the number of optimizer steps of a rehearsal, which replaces the budget and covers the whole schedule.
        inspect: whether to inspect the data, and to validate at the end of a sweep.
        check_target: whether to validate one batch at the end of a sweep, to see whether it logs the target.
        watch: whether to compare the training samples with the validation samples, and the weights before each validation with
            those after it.
        blind: whether validation gets only one sample, which shows whether training uses validation data.
        keep: a file for the weights that are validated.
        take: a file of weights to validate instead of the module's.
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
    """Return the factor of the base learning rate in the bench's own schedules at the fraction ``u`` of the budget."""
    if u < warm_up:
        return max(u, 1e-3) / warm_up
    v = (u - warm_up) / (1 - warm_up)
    return 1 - v if schedule == "linear" else (1 + math.cos(math.pi * v)) / 2


def _amount(text: object, units: str) -> tuple[float, str | None]:
    """Return the number in ``text`` and its unit from ``units`` (joined by ``|``) or None; -1 if there is no number."""
    found = re.fullmatch(rf"\s*([0-9.]+(?:e-?[0-9]+)?)\s*({units})?\s*", str(text))
    if found is not None:
        with suppress(ValueError):  # such as 1.2.3
            return float(found[1]), found[2]
    return -1.0, None


def warm_up_share(text: str | float, seconds: float) -> float:
    """Return a warm-up of ``"5s"`` (or rs, m, h), ``"5%"`` or 0.05 as a fraction of a budget of ``seconds``.

    Raises:
        ValueError: for any other text, or for more than half of the budget.
    """
    value, unit = _amount(text, "rs|s|min|m|h|%")
    share = value / 100 if unit == "%" else value if unit is None else value * _UNITS[unit] / seconds
    if 0 <= share <= 0.5:
        return share
    raise ValueError(
        f"Got warm-up {text!r}; expected seconds ('5s', '1m') or a fraction ('5%', 0.05) of the budget of {seconds:g} s, at"
        " most half of it."
    )


@dataclass(frozen=True)
class Budget:
    """Training seconds, in wall-clock or reference-system time."""

    seconds: float
    clock: Literal["wall", "reference"]

    @classmethod
    def parse(cls, text: "str | float | Budget") -> "Budget":
        """Return the budget of ``"120s"``, ``"2m"``, ``"1h"``, ``"120rs"`` (reference-system time) or a number of seconds.

        Raises:
            ValueError: for any other value, or a text without a unit.
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
                f"Got budget {text!r}; expected training seconds above 0: '120s' (or '2m', '1h') of wall-clock time, or"
                " '120rs' of reference-system time, in which each step costs the calibrated time of its kind."
            )
        return cls(seconds, "reference" if unit == "rs" else "wall")
