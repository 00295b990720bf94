"""Outcomes of runs, the combinations that are not tried again, and advice for a failed search."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_eff.tune.config import Choices
from lightning_eff.tune.proposals.proposing import Trial

CRASHES = 2  # crashes of a recipe with different settings, after which it is not tried again


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        value: the target at the end of the run. None if it did not get there.
        why: the reason if it did not.
        refused: whether this combination of techniques cannot train here with any settings.
        crashed: whether it did not train with these settings. Other settings may work.
        over: whether the time for trials was over first. Nothing else is known then, and nothing is kept.
        seconds: its duration, with its rehearsal.
        peak_bytes: its peak memory. None if unknown.
    """

    value: float | None
    why: str | None = None
    refused: bool = False
    crashed: bool = False
    over: bool = False
    seconds: float = 0.0
    peak_bytes: int | None = None


class Run(Protocol):
    """Trains choices for a budget of seconds, with a learning rate that decays over this budget."""

    def __call__(self, choices: Choices, budget: float) -> Outcome: ...


def refusals(trials: Iterable[Trial]) -> dict[frozenset[str], str]:
    """Return the combinations that cannot train, with the reason: refused ones, and those that crashed with two settings."""
    found: dict[frozenset[str], str] = {}
    crashes: dict[frozenset[str], set[str]] = {}
    for trial in trials:
        stack = frozenset(trial.choices.techniques)
        if trial.crashed:
            crashes.setdefault(stack, set()).add(trial.choices.key)
        if stack and (trial.refused or len(crashes.get(stack, ())) >= CRASHES):
            found[stack] = str(trial.why)
    return found


def advice(ended: Sequence[Mapping[str, Any]]) -> str:
    """Return advice for a search in which no trial of the baseline had the whole budget, by why the last one ended."""
    why = str(ended[-1]["why"]) if ended else ""
    if why.startswith("it used"):
        return "Raise --memory, or set smaller batches in a space file, under own: {batch: [...]}."
    if why.startswith("crashed") or (ended and ended[-1]["refused"]):
        return "Fix this error, and search again in another folder (--out)."
    return "Set lower learning rates in a space file, under own: {rate: {low: ..., high: ..., log: true}}, or raise --search."
