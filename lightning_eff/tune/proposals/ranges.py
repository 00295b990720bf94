"""Values from ranges: suggested by Optuna, drawn at random, or nearest to the value in a config."""

import math
import random
from typing import Any

from lightning_eff._core.search_space import Choice, Integer, Range, Uniform, frozen
from lightning_eff.tune.inspection.probing import middle


def suggest(trial: Any, name: str, what: Range) -> Any:
    """Return the value that an Optuna trial suggests. The parameter of a choice is the index of its value."""
    if isinstance(what, Choice):
        return what.values[trial.suggest_categorical(name, tuple(range(len(what.values))))]
    if isinstance(what, Integer):
        return trial.suggest_int(name, what.low, what.high, log=what.log)
    return trial.suggest_float(name, what.low, what.high, log=what.log)


def code(what: Range, value: Any) -> Any:
    """Return the parameter of :func:`suggest` for a value."""
    if not isinstance(what, Choice):
        return value
    return next(i for i, one in enumerate(what.values) if frozen(one) == frozen(value))


def near(what: Range, value: Any) -> Any:
    """Return the value nearest to the value in the config, or the middle of the range if it is unknown."""
    if value is None:
        return middle(what)
    if isinstance(what, Choice):
        if value in what.values:
            return value
        numbers = [one for one in what.values if isinstance(one, int | float) and not isinstance(one, bool)]
        return min(numbers, key=lambda one: abs(one - value)) if numbers else what.values[0]
    return min(max(value, what.low), what.high)


def anywhere(draw: random.Random, what: Range) -> Any:
    """Return a random value."""
    if isinstance(what, Choice):
        return draw.choice(what.values)
    if what.log:
        return _within(what, math.exp(draw.uniform(math.log(what.low), math.log(what.high))))
    return _within(what, draw.uniform(what.low, what.high))


def _within(what: Uniform | Integer, value: float) -> float:
    value = min(max(value, what.low), what.high)
    return round(value) if isinstance(what, Integer) else value
