"""Estimates of how long the parts of a search take, and the plan that fits them into its time."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.calibration import FEWEST_STEPS, sweep_steps

FIRST = 8  # steps that measure how long a bench's rehearsals must be
ROUNDS = 4  # rehearsals per arm in the confirming bench
EVALUATIONS = 10  # validations per run in the confirming bench
SEARCHED = 2  # validations per run in the search
LATE = 3  # a job may take this many times its expected time
PATIENCE = 60.0  # and this many seconds more, or the budget if that is longer
SETUP = 10.0  # seconds that a technique may take to set up when it is tried for two steps, or more with a long budget
LEAST = 3  # arms of the smallest confirming bench: the baseline, a recipe and its control
STACKED = 3  # the assumed number of techniques in a recipe
PROMOTED = 3  # one of so many trials continues at the next fraction of the budget


@dataclass(frozen=True)
class Durations:
    """Estimated durations in seconds of the parts of a run. Those of trials and benches follow from them.

    Attributes:
        budget: the training time of a whole run.
        step: one optimizer step.
        start: building the module, the data and the trainer, up to the first step.
        validation: one validation.
        process: starting a process in which a run trains.
        seeds: the number of seeds that confirm a recipe.
        jobs: the number of parallel runs.
    """

    budget: float
    step: float
    start: float
    validation: float
    process: float
    seeds: int
    jobs: int

    @property
    def rehearsal(self) -> float:
        """A rehearsal, a few steps that pass through the whole schedule."""
        return self.start + self.step * sweep_steps(self.budget, self.step)

    @property
    def probe(self) -> float:
        """A trial of two steps."""
        return self.start + 2 * self.step

    @property
    def probe_limit(self) -> float:
        """The time after which a trial of two steps is ended, so that no technique delays all others."""
        return self.process + max(SETUP, min(self.budget / 20, PATIENCE)) + LATE * self.probe

    def run(self, share: float) -> float:
        """A run of the search at this fraction of the budget."""
        return self.start + share * self.budget + SEARCHED * self.validation

    def limit(self, seconds: float) -> float:
        """Return the time after which a job that should take ``seconds`` is ended, so that one that hangs does not stay.

        The limit is generous. The machine may be busy, and a technique may search or compile before its first step.
        """
        return self.process + max(self.budget, PATIENCE) + LATE * seconds

    def trial(self, shares: Sequence[float]) -> float:
        """Return the duration of a trial that runs at each of these fractions of the budget, with its rehearsals."""
        return 2 * self.rehearsal + self.validation + sum(map(self.run, shares))

    def trials(self, seconds: float, shares: Sequence[float]) -> int:
        """Return about how many recipes ``seconds`` compare. The baseline has as many trials, and most trials end early."""
        runs = sum(self.run(share) / PROMOTED**i for i, share in enumerate(shares))
        recipe = 2 * self.rehearsal + self.validation + runs
        return max(1, int(self.jobs * seconds / (runs + recipe)))

    def bench(self, arms: int, known: int = 0) -> float:
        """Return the duration of a bench.

        Args:
            arms: the number of arms, the baseline and the controls included.
            known: how many of these another bench has trained, the baseline first. Only the baseline rehearses again.
        """
        first = self.process + self.start + FIRST * self.step
        rehearsed = (arms - max(known - 1, 0)) * ((1 + ROUNDS) * self.rehearsal + self.validation)
        run = self.process + self.start + self.budget + EVALUATIONS * self.validation
        return first + rehearsed + math.ceil((arms - known) * self.seeds / self.jobs) * run

    def least(self, shares: Sequence[float]) -> float:
        """Return the duration of the smallest search: a trial of the baseline, a trial of a recipe, and its confirmation."""
        trials = math.ceil(2 / self.jobs) * self.trial(shares)
        return trials + self.bench(LEAST)

    def longest_budget(self, seconds: float, shares: Sequence[float]) -> float | None:
        """Return the longest budget for which the smallest search takes at most ``seconds``. None if there is none."""
        low, high = FEWEST_STEPS * self.step, self.budget
        if replace(self, budget=low).least(shares) > seconds:
            return None
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if replace(self, budget=middle).least(shares) <= seconds else (low, middle)
        return low


def in_words(seconds: float) -> str:
    """Return a duration for people, such as ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Timetable:
    """Divides the time of a search into the profile, the trials and the confirmation.

    Args:
        search: the seconds of the whole search. None sets no limit.
        shares: the fractions of the budget at which a trial runs.
        before: the seconds that were spent before the search was resumed.
    """

    def __init__(self, search: float | None, shares: Sequence[float], before: float = 0.0) -> None:
        self.search, self._shares = search, tuple(shares)
        self._began, self._before = time.monotonic(), before

    @property
    def spent(self) -> float:
        """The seconds spent so far, without the pause before a resumed search."""
        return self._before + time.monotonic() - self._began

    @property
    def left(self) -> float:
        """The seconds that are left. They are negative when the search is late."""
        return math.inf if self.search is None else self.search - self.spent

    def check(self, durations: Durations) -> None:
        """Raise ``UsageError`` if the time left is too short to confirm one recipe."""
        least = durations.least(self._shares)
        if self.left >= least:
            return
        budget = durations.longest_budget(self.left, self._shares)
        shorter = f", or --budget to {math.floor(budget)}s or less" if budget is not None and budget >= 1 else ""
        raise UsageError(
            f"--search {self.search:.0f}s is too short to confirm anything. With a budget of {durations.budget:g} s and"
            f" {durations.jobs} parallel run(s), it takes about {in_words(least)} to try the baseline and one recipe and to"
            f" confirm that recipe on {durations.seeds} seeds. Set --search to {math.ceil(self.spent + least)}s or more"
            f"{shorter}."
        )

    def kept(self, durations: Durations) -> float:
        """Return the seconds that are reserved for the confirmation.

        They are enough for one recipe. They are enough for everything that can follow, if that is at most half of the rest.
        """
        whole = durations.bench(2 * LEAST - 1)  # two recipes
        whole += durations.bench(2 + STACKED, known=2) + durations.bench(
            LEAST, known=1
        )  # leave-one-out, reduced recipe
        return max(min(whole, self.left / 2), min(durations.bench(LEAST), self.left), 0.0)

    def describe(self, durations: Durations, seconds: float, *, again: bool = False) -> str:
        """Return the plan in words.

        Args:
            durations: the estimates.
            seconds: the time for trials.
            again: whether the search was resumed. Then it is not known how much of the confirmation is done.
        """
        if again:
            return f"{in_words(seconds)} of --search are left for trials"
        confirming = durations.bench(LEAST)
        late = confirming - (self.left - seconds)
        return (
            f"{in_words(seconds)} for trials (about {durations.trials(seconds, self._shares)} recipes and as many settings of"
            f" the baseline), then about {in_words(confirming)} to confirm one recipe on {durations.seeds} seeds"
            + (f"; it may end {in_words(late)} late" if late > 1 else "")
        )
