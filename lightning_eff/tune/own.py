"""The baseline's own settings: learning rate, weight decay, batch size and warm-up, where they are set, and their ranges."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_eff._core.search_space import Choice, Range, Uniform
from lightning_eff.tune.inspection.profiling import Found

NAMES = ("rate", "weight_decay", "batch", "warm_up")
_CALLED = {
    "rate": re.compile(r"(^|_)(lr|learning_rate|rate)$"),
    "weight_decay": re.compile(r"(^|_)(weight_decay|wd|decay)$"),
    "batch": re.compile(r"batch_?size|(^|_)batch$|^bs$"),
    "warm_up": re.compile(r"warm_?up"),
}
_OTHER = {  # other settings whose names contain the same words
    "rate": re.compile(r"drop|mask|mix"),
    "batch": re.compile(r"(^|_)(val|valid|validation|eval|test|predict)(_|$)"),
}
WARM_UP = Uniform(0.0, 0.3)  # fraction of the budget
SETTINGS = "lightning_eff.tune.settings.OptimizerSettings"


@dataclass(frozen=True)
class Own:
    """One of the baseline's own settings.

    Attributes:
        name: "rate", "weight_decay", "batch", "warm_up", or the user's own name.
        range: the values to try. A warm-up is a fraction of the budget.
        value: the value in the config. None if unknown.
        key: its key in the config, such as ``model.init_args.lr``. None if it is set from outside: by
            ``OptimizerSettings``, or by the schedule that replaces one without decay.
        in_steps: whether the config has it in optimizer steps, while ``range`` is a fraction of the budget.
        same_cost: whether the cost of a step does not depend on it.
    """

    name: str
    range: Range
    value: Any
    key: str | None
    in_steps: bool = False
    same_cost: bool = False

    def describe(self) -> str:
        """Return the setting in words."""
        where = self.key or "set from outside"
        return (
            f"{self.name} ({where}, now {self.value if self.value is not None else 'unknown'}): {in_words(self.range)}"
        )


def in_words(what: Range) -> str:
    """Return a range in words."""
    if isinstance(what, Choice):
        return " or ".join(map(str, what.values))
    return f"{what.low:g} to {what.high:g}{' on a log scale' if what.log else ''}"


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a config with their dotted keys."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(config, int | float) and not isinstance(config, bool):
        yield prefix, config


def discover(config: Mapping[str, Any], found: Found) -> tuple[list[Own], dict[str, str]]:
    """Return the baseline's own settings that can be searched, and why others cannot.

    An argument is taken for the learning rate, weight decay or batch size if its name and its value match the run. Names
    alone can mislead.

    Args:
        config: the parsed config with the defaults of every class, with the sections ``model`` and ``data``.
        found: the profile.
    """
    numbers = {key: value for section in ("model", "data") for key, value in flat(config.get(section) or {}, section)}

    def called(what: str, seen: float | None) -> str | None:
        names = [key for key in numbers if _CALLED[what].search(key.rpartition(".")[2])]
        names = [key for key in names if what not in _OTHER or not _OTHER[what].search(key.rpartition(".")[2])]
        if seen is not None:
            names = [key for key in names if math.isclose(numbers[key], seen, rel_tol=1e-4, abs_tol=1e-12)]
        return min(names, key=len, default=None)

    owns: list[Own] = []
    without: dict[str, str] = {}
    base = found.base_rate
    if base > 0:
        owns.append(Own("rate", Uniform(base / 10, base * 10, log=True), base, called("rate", base), same_cost=True))
    else:
        without["rate"] = "the module's optimizers have no learning rate above 0"
    decay = max(found.decays, default=None)
    if decay is None:
        without["weight_decay"] = "the module's optimizers have no weight decay"
    else:
        tried: Range = Uniform(decay / 10, decay * 10, log=True) if decay > 0 else Choice((0.0, 0.01, 0.1))
        owns.append(Own("weight_decay", tried, decay, called("weight_decay", decay), same_cost=True))
    size = found.run.batch_size
    if (key := called("batch", size)) is not None:
        sizes = sorted({max(1, size // 2), size, size * 2, size * 4})
        owns.append(Own("batch", Choice(tuple(sizes)), size, key))
    else:
        without["batch"] = (
            f"no batch size in the config has the value {size} of the run's batches. Name it in --space, under own:"
            " {batch: {key: data.init_args.NAME, values: [...]}}"
        )
    if found.run.manual_optimization and not found.run.decayed_rate:
        without["warm_up"] = "a schedule cannot replace one that the module steps itself"
    elif not found.run.decayed_rate:
        owns.append(Own("warm_up", WARM_UP, None, None, same_cost=True))
    elif (key := called("warm_up", None)) is not None:
        value = numbers[key]
        in_steps = isinstance(value, int) or value > 1
        owns.append(Own("warm_up", WARM_UP, value / found.steps if in_steps else value, key, in_steps, same_cost=True))
    else:
        without["warm_up"] = (
            "the module has its own schedule, and no number in its config is named warm-up. Name it in --space, under own:"
            " {warm_up: {key: model.init_args.NAME, low: 0.0, high: 0.3}}"
        )
    return owns, without
