"""Values of a range: those that Optuna suggests, those at random, and the one that is nearest to what a config has."""

import math
import random
from typing import Any

from lightning_eff._core.search_space import Choice, Integer, Range, Uniform, frozen
from lightning_eff.tune.inspection.probing import middle


def suggest(trial: Any, name: str, what: Range) -> Any:
    """A value of a range by an Optuna trial; of a few values, their number is its parameter."""
    if isinstance(what, Choice):
        return what.values[trial.suggest_categorical(name, tuple(range(len(what.values))))]
    if isinstance(what, Integer):
        return trial.suggest_int(name, what.low, what.high, log=what.log)
    return trial.suggest_float(name, what.low, what.high, log=what.log)


def code(what: Range, value: Any) -> Any:
    """The parameter of :func:`suggest` that stands for a value."""
    if not isinstance(what, Choice):
        return value
    return next(i for i, one in enumerate(what.values) if frozen(one) == frozen(value))


def near(what: Range, value: Any) -> Any:
    """The value of a range that is nearest to the config's own; its middle where there is none."""
    if value is None:
        return middle(what)
    if isinstance(what, Choice):
        if value in what.values:
            return value
        numbers = [one for one in what.values if isinstance(one, int | float) and not isinstance(one, bool)]
        return min(numbers, key=lambda one: abs(one - value)) if numbers else what.values[0]
    return min(max(value, what.low), what.high)


def anywhere(draw: random.Random, what: Range) -> Any:
    """A value at random."""
    if isinstance(what, Choice):
        return draw.choice(what.values)
    if what.log:
        return _within(what, math.exp(draw.uniform(math.log(what.low), math.log(what.high))))
    return _within(what, draw.uniform(what.low, what.high))


def _within(what: Uniform | Integer, value: float) -> float:
    value = min(max(value, what.low), what.high)
    return round(value) if isinstance(what, Integer) else value
