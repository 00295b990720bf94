"""What the baseline has of its own: its rate, weight decay, batch and warm-up, where they are set, and what a search tries."""

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
_OTHER = {  # what the same words stand in that is not meant
    "rate": re.compile(r"drop|mask|mix"),
    "batch": re.compile(r"(^|_)(val|valid|validation|eval|test|predict)(_|$)"),
}
WARM_UP = Uniform(0.0, 0.3)  # of the budget
SETTINGS = "lightning_eff.tune.settings.OptimizerSettings"


@dataclass(frozen=True)
class Own:
    """One setting of the baseline's own.

    Attributes:
        name: "rate", "weight_decay", "batch", "warm_up", or a name of the user's.
        range: what is tried; a warm-up as a share of the budget.
        value: what the config has; None where that is not known.
        key: where the config has it, such as ``model.init_args.lr``; None for what is set from outside: by
            ``OptimizerSettings``, or by the schedule that stands in the place of one that does not decay.
        in_steps: whether the config has it in optimizer steps, while ``range`` is a fraction of the budget.
        same_cost: whether the cost of a step does not depend on it.
    """

    name: str
    range: Range
    value: Any
    key: str | None
    in_steps: bool = False
    same_cost: bool = False

    def told(self) -> str:
        """In words."""
        where = self.key or "set from outside"
        return (
            f"{self.name} ({where}, now {self.value if self.value is not None else 'unknown'}): {in_words(self.range)}"
        )


def in_words(what: Range) -> str:
    """A range for people."""
    if isinstance(what, Choice):
        return " or ".join(map(str, what.values))
    return f"{what.low:g} to {what.high:g}{' by ratio' if what.log else ''}"


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of a config by their dotted keys."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(config, int | float) and not isinstance(config, bool):
        yield prefix, config


def discover(config: Mapping[str, Any], found: Found) -> tuple[list[Own], dict[str, str]]:
    """The baseline's own settings that can be searched, and why others cannot.

    An argument counts as the rate, the decay or the batch if it is called so and has the value that the run was seen to
    have: names alone deceive.

    Args:
        config: as the command line reads it, with the defaults of every class: sections ``model`` and ``data``.
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
        without["rate"] = "the module's optimizers have no rate above 0"
    decay = max(found.decays, default=None)
    if decay is None:
        without["weight_decay"] = "the module's optimizers have none"
    else:
        tried: Range = Uniform(decay / 10, decay * 10, log=True) if decay > 0 else Choice((0.0, 0.01, 0.1))
        owns.append(Own("weight_decay", tried, decay, called("weight_decay", decay), same_cost=True))
    size = found.run.batch_size
    if (key := called("batch", size)) is not None:
        sizes = sorted({max(1, size // 2), size, size * 2, size * 4})
        owns.append(Own("batch", Choice(tuple(sizes)), size, key))
    else:
        without["batch"] = (
            f"no number of the config that is called batch is {size}, as the run's batches are; name it in --space, own:"
            " {batch: {key: data.init_args.NAME, values: [...]}}"
        )
    if found.run.manual_optimization and not found.run.decayed_rate:
        without["warm_up"] = "no schedule can stand in the place of one that the module steps by itself"
    elif not found.run.decayed_rate:
        owns.append(Own("warm_up", WARM_UP, None, None, same_cost=True))
    elif (key := called("warm_up", None)) is not None:
        value = numbers[key]
        in_steps = isinstance(value, int) or value > 1
        owns.append(Own("warm_up", WARM_UP, value / found.steps if in_steps else value, key, in_steps, same_cost=True))
    else:
        without["warm_up"] = (
            "the module decays its rate by itself, and no number of its config is called warm-up; name it in --space, own:"
            " {warm_up: {key: model.init_args.NAME, low: 0.0, high: 0.3}}"
        )
    return owns, without
