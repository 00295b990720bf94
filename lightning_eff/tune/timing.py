"""How long the parts of a search take: what can be done in its time, what cannot, and how much time that would need."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.calibration import sweep_steps

FIRST = 8  # steps by which a bench finds how long its rehearsals are
ROUNDS = 4  # of rehearsals in a bench that confirms
EVALUATIONS = 10  # validations of each of its runs
SEARCHED = 4  # validations of a run that searches
LATE = 3  # times as long as expected is what a job may take, beside
PATIENCE = 60.0  # seconds, or the budget where that is more
LEAST = 3  # arms of the smallest bench that confirms: the baseline, a recipe and its control
STACKED = 3  # techniques of a stack, when it is not known yet


@dataclass(frozen=True)
class Durations:
    """Seconds of the parts of a run, from which those of trials and benches follow.

    Attributes:
        budget: of a whole run's training.
        step: of an optimizer step.
        start: to build the module, the data and the trainer, up to the first step.
        validation: of one.
        process: to start a process in which a run trains.
        seeds: on which a recipe is confirmed.
        jobs: runs at once.
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
        """Of some steps that pass through the whole schedule."""
        return self.start + self.step * sweep_steps(self.budget, self.step)

    @property
    def probe(self) -> float:
        """Of a technique that is tried for two steps."""
        return self.start + 2 * self.step

    def limit(self, seconds: float) -> float:
        """After how many seconds a job that takes about ``seconds`` is ended, so that one that hangs does not end a search.

        On a busy machine it takes longer, and a technique may begin with a search of its own or with compiling: that may last
        as long as a run's whole budget.
        """
        return self.process + max(self.budget, PATIENCE) + LATE * seconds

    def trial(self, shares: Sequence[float]) -> float:
        """Of a trial with a run at each of these shares of the budget, which rehearses beside the baseline before."""
        runs = sum(self.start + share * self.budget + SEARCHED * self.validation for share in shares)
        return 2 * self.rehearsal + self.validation + runs

    def bench(self, arms: int, known: int = 0) -> float:
        """Of a bench of so many arms, the baseline and the controls among them.

        Args:
            arms: how many.
            known: of these, the baseline first: what another bench has trained; only the baseline rehearses again.
        """
        first = self.process + self.start + FIRST * self.step
        rehearsed = (arms - max(known - 1, 0)) * ((1 + ROUNDS) * self.rehearsal + self.validation)
        run = self.process + self.start + self.budget + EVALUATIONS * self.validation
        return first + rehearsed + math.ceil((arms - known) * self.seeds / self.jobs) * run


def in_words(seconds: float) -> str:
    """A time for people: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Timetable:
    """What the time of a search is for: looking, trials, confirming.

    Args:
        search: seconds of it all; None for no limit.
        shares: of the budget at which a trial runs.
        before: seconds that were spent on it before it was gone on with.
    """

    def __init__(self, search: float | None, shares: Sequence[float], before: float = 0.0) -> None:
        self.search, self._shares = search, tuple(shares)
        self._began, self._before = time.monotonic(), before

    @property
    def spent(self) -> float:
        """Seconds since it began, but for those between an end and the next beginning."""
        return self._before + time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until it is over, or less than nothing."""
        return math.inf if self.search is None else self.search - self.spent

    def check(self, durations: Durations) -> None:
        """Raise ``UsageError`` if not even a trial of the baseline fits into what is left."""
        trial = durations.trial(self._shares)
        need = self.spent + trial
        if self.search is not None and self.search < need:
            whole = need + trial + durations.bench(LEAST)
            raise UsageError(
                f"Got --search of {self.search:.0f} s; expected at least {math.ceil(need)} s, for one trial of the baseline on"
                f" a budget of {durations.budget:g} s, and about {math.ceil(whole)} s to try one recipe beside it, too, and to"
                f" confirm that on {durations.seeds} seeds with {durations.jobs} run(s) at once. Raise --search, or lower"
                " --budget."
            )

    def kept(self, durations: Durations) -> float:
        """Seconds of what is left that are kept for confirming: for all of it, or half if that is less."""
        whole = durations.bench(2 * LEAST - 1)  # two recipes
        whole += durations.bench(2 + STACKED, known=2) + durations.bench(LEAST, known=1)  # leaving out; what is left
        return max(min(whole, self.left / 2), 0.0)

    def told(self, durations: Durations, seconds: float, *, again: bool = False) -> str:
        """What the time is for, in words, once ``seconds`` are for trials; ``again`` for a search that is gone on with."""
        if again:  # of confirming nobody knows how much is done
            return f"{in_words(seconds)} of --search are left for trials"
        confirming = durations.bench(LEAST)
        late = confirming - (self.left - seconds)
        return (
            f"{in_words(seconds)} of --search are for trials, and to confirm one recipe takes about {in_words(confirming)}"
            + (f", so that it may end {in_words(late)} late" if late > 1 else "")
        )
