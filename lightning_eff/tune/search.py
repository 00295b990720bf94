"""The search: it proposes trials in one order, runs them in parallel, and decides on them in that order."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from lightning_eff.bench.results import write_json
from lightning_eff.tune.config import Choices
from lightning_eff.tune.outcomes import Outcome, Run, advice, refusals
from lightning_eff.tune.proposals.proposing import (
    FACTOR,
    KINDS,
    RUNGS,
    Proposer,
    Trial,
    is_promoted,
    refreshed,
    require_extra,
)
from lightning_eff.tune.space import Space

__all__ = ["FACTOR", "KINDS", "RUNGS", "Outcome", "Run", "Search", "chosen", "require_extra"]

STARTUP = 10  # random trials of each kind, before the sampler uses their results and the leading recipe is refreshed
FREE = 30  # successive proposals that are refused without a run, after which a recipe is drawn at random
AHEAD = 3  # trials that may be active together with one or two jobs; their proposals do not use each other's results
SAFE = 0.75  # a run is begun if this fraction of the runs at its budget would end in time


class Search:
    """Runs trials of the baseline's own settings and of recipes, as many of each kind, until the time is over.

    A trial runs at a ninth of the budget, then at a third, then at all of it. At each of these it is compared with the earlier
    trials of its kind, and continues if it is in their best third. A run begins only if it should end in time.

    The trials do not depend on how many run in parallel, on which machine, or which ends first. A proposal uses the results
    of all earlier trials but the last ``AHEAD``, and a trial waits at each budget for the earlier ones. Searches with more
    than two jobs look further ahead, so that every job has work. Their trials differ from those of a search with two jobs.

    An interrupted search resumes: the outcome of every run is on disk, and active trials continue.

    Args:
        space: the choices.
        run: trains a trial. It is called from several threads.
        folder: the folder for the trials and the outcomes of their runs.
        mode: "min" or "max".
        budget: the seconds of a whole run.
        seconds: the seconds of the search, the time before it was resumed included.
        seed: the seed of everything that is drawn.
        jobs: the number of parallel runs.
        limit: the largest number of trials of each kind. None uses the time alone.
        tell: called with a line for people when a trial begins and when it ends.
    """

    def __init__(
        self,
        space: Space,
        run: Run,
        folder: Path,
        *,
        mode: str,
        budget: float,
        seconds: float,
        seed: int = 0,
        jobs: int = 1,
        limit: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._proposer = Proposer(space, mode, seed)
        self.space, self.run, self.folder, self.mode = space, run, folder, mode
        self.budget, self.seconds, self.jobs, self.limit = budget, seconds, jobs, limit
        self._tell = tell or (lambda line: None)
        (folder / "outcomes").mkdir(parents=True, exist_ok=True)
        self._clock, self._file = folder / "clock.json", folder / "trials.json"
        clock = json.loads(self._clock.read_text()) if self._clock.is_file() else {}
        self._before = clock.get("seconds", 0.0)
        self._began = time.monotonic()
        self._stopped = threading.Event()
        found = json.loads(self._file.read_text()) if self._file.is_file() else {"ahead": _ahead(jobs), "trials": []}
        self._ahead: int = found["ahead"]
        self._all = [Trial.of(record) for record in found["trials"]]
        self._took: dict[int, list[float]] = {rung: [] for rung in RUNGS}  # seconds of the runs
        for rung in RUNGS:
            for file in (folder / "outcomes").glob(f"*-{self._share(rung):g}.json"):
                self._took[rung].append(json.loads(file.read_text())["seconds"])
        self._over: set[int] = set()  # places of trials that were ended because the time was over

    # -- the whole

    @property
    def spent(self) -> float:
        """The seconds of the search so far."""
        return self._before + time.monotonic() - self._began

    def search(self) -> None:
        """Run trials until the time or the number of trials is used up.

        Raises:
            RuntimeError: if no trial of the baseline had the whole budget.
        """
        kinds = KINDS if self.space.techniques else KINDS[:1]
        under_way: dict[Future[Outcome], tuple[Trial, int]] = {}
        heard: dict[tuple[int, int], Outcome] = {}  # by place and rung
        pool = ThreadPoolExecutor(self.jobs)
        try:
            while True:
                self._decide(heard)
                while len(under_way) < self.jobs and (following := self._next(kinds, heard, under_way)) is not None:
                    trial, rung = following
                    future = pool.submit(self._outcome, trial.choices, self._share(rung))
                    under_way[future] = following
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    trial, rung = under_way.pop(future)
                    if (outcome := future.result()).over:
                        self._over.add(trial.place)
                    else:
                        heard[trial.place, rung] = outcome
                        self._took[rung].append(outcome.seconds)
        except BaseException:
            self._stopped.set()  # the results of runs that are ended from outside do not count
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            self._save_clock()
        pool.shutdown()
        if self.best("baseline") is None:
            ended = [record for record in self.trials("baseline") if record["why"]]
            said = f"the last reason: {ended[-1]['why']}" if ended else "the search was too short"
            raise RuntimeError(
                f"None of the baseline's {len(self.trials('baseline'))} trials trained for the whole budget; {said}."
                f" {advice(ended)}"
            )

    def _decide(self, heard: Mapping[tuple[int, int], Outcome]) -> None:
        """End or continue trials by their last runs, in their order: each waits until the earlier ones came as far."""
        running = [trial for trial in self._all if trial.state == "running"]
        for trial in running:
            while trial.state == "running" and (outcome := heard.get((trial.place, _rung(trial)))) is not None:
                rung = _rung(trial)
                if outcome.peak_bytes is not None:
                    trial.peak_bytes = max(trial.peak_bytes or 0, outcome.peak_bytes)
                if outcome.value is None:
                    trial.why, trial.refused, trial.crashed = outcome.why, outcome.refused, outcome.crashed
                    self._end(trial, "pruned", str(outcome.why))
                    break
                earlier = [other for other in self._of(trial.kind) if other.place < trial.place and not other.free]
                if any(other.state == "running" and rung not in other.values for other in earlier):
                    break
                trial.values[rung] = outcome.value
                if rung == RUNGS[-1]:
                    self._end(trial, "complete", f"{outcome.value:.5g}")
                elif not is_promoted(outcome.value, [o.values[rung] for o in earlier if rung in o.values], self.mode):
                    trial.why = f"not in the best third at 1/{RUNGS[-1] // rung} of the budget"
                    self._end(
                        trial, "pruned", f"{outcome.value:.5g} at 1/{RUNGS[-1] // rung} of the budget, stopped there"
                    )

    def _end(self, trial: Trial, state: str, said: str) -> None:
        trial.state, trial.ended = state, self.spent
        self._save()
        bests = [f"{kind} {best['value']:.5g}" for kind in KINDS if (best := self.best(kind)) is not None]
        self._tell(
            f"{trial.kind} {trial.number + 1}: {trial.choices.describe()}: {said}; best so far: {', '.join(bests) or 'none'};"
            f" {self.spent:.0f} s of {self.seconds:.0f} s"
        )

    def _next(
        self,
        kinds: tuple[str, ...],
        heard: Mapping[tuple[int, int], Outcome],
        under_way: Mapping[Any, tuple[Trial, int]],
    ) -> tuple[Trial, int] | None:
        """Return the next run: that of the first trial that can continue, or else of a new trial.

        Returns:
            None if all must wait, or the time is over.
        """
        busy = {trial.place for trial, _ in under_way.values()}
        same = {(trial.choices.key, rung) for trial, rung in under_way.values()}

        def free(trial: Trial) -> bool:
            rung = _rung(trial)
            known = trial.place in busy or trial.place in self._over or (trial.place, rung) in heard
            return (
                not known and (trial.choices.key, rung) not in same and self._fits(trial)
            )  # it waits for the same run

        running = [trial for trial in self._all if trial.state == "running"]
        place = sum(not trial.free for trial in self._all)
        following = next(filter(free, running), None)
        if following is None and not (running and running[0].place <= place - self._ahead):
            begun = self._begun(kinds, place, bool(running))
            following = begun if begun is not None and free(begun) else None
        return None if following is None else (following, _rung(following))

    def _share(self, rung: int) -> float:
        """The seconds of a run at a rung."""
        return self.budget * rung / RUNGS[-1]

    def _expected(self, rung: int, share: float) -> float:
        """Return the time in which this fraction of the runs at a rung ended, or an estimate from shorter runs."""
        took = sorted(self._took[rung])
        if took:
            return took[min(int(share * len(took)), len(took) - 1)] if share > 0.5 else median(took)
        return 0.0 if rung == RUNGS[0] else FACTOR * self._expected(rung // FACTOR, share)

    def _fits(self, trial: Trial) -> bool:
        """Whether the next run of a trial should end in time. The first whole run of each kind always counts as fitting."""
        first = next(one for one in self._all if one.kind == trial.kind and one.state == "running")
        if trial is first and self.best(trial.kind) is None:
            return True
        return self.spent + self._expected(_rung(trial), SAFE) <= self.seconds

    # -- a new trial

    def _begun(self, kinds: tuple[str, ...], place: int, waiting: bool) -> Trial | None:
        """Return a new trial at a place. None if the time or the number of trials is used up, or all proposals are refused."""
        tried = min(sum(not trial.free for trial in self._of(kind)) for kind in kinds) > 0
        if self.spent + sum(self._expected(rung, 0.5) for rung in RUNGS) > self.seconds and tried:
            return None
        counts = {kind: len(self._counted(kind, place)) for kind in kinds}
        kind = min(kinds, key=lambda one: counts[one])
        if self.limit is not None and counts[kind] >= self.limit:
            counts = {kind: len(self._counted(kind)) for kind in kinds}
            kind = min(kinds, key=lambda one: counts[one])
            if waiting or counts[kind] >= self.limit:
                return None
        known = self._known(place)
        refused = refusals(known)
        best = self._leading(known, KINDS[0])
        again = self._refreshed(known, best) if kind != KINDS[0] and counts[kind] >= STARTUP else None
        free = sum(trial.free and trial.place == place for trial in self._all)
        while free < 2 * FREE:
            number = len(self._of(kind))
            start = counts[kind] < STARTUP or free >= FREE
            parameters, choices = self._proposer.proposed(
                kind,
                [trial for trial in self._known(place) if trial.kind == kind],
                [t for t in self._of(kind) if not t.free and t.place > place - self._ahead],
                again or (self._proposer.drawn(kind, number, best, refused) if start else None),
            )
            trial = Trial(kind, number, place, parameters, choices)
            self._all.append(trial)
            trial.why = self._known_refusal(kind, choices, refused)
            if trial.why is None:
                self._save()
                self._tell(f"{kind} {number + 1}: trying {choices.describe()}")
                return trial
            trial.state, trial.free, trial.ended = "pruned", True, self.spent
            free, again = free + 1, None
        self._save()
        return None

    def _leading(self, known: list[Trial], kind: str) -> Choices | None:
        """Return the best choices among the known trials that had the whole budget."""
        complete = [trial for trial in known if trial.kind == kind and trial.value is not None]
        return self._sorted(complete)[0].choices if complete else None

    def _refreshed(self, known: list[Trial], best: Choices | None) -> Choices | None:
        """Return the leading recipe with the baseline's best settings, if these were found later."""
        leading = self._leading(known, KINDS[1])
        if leading is None or best is None:
            return None
        tried = {kind: [trial.choices for trial in self._of(kind)] for kind in KINDS}
        return refreshed(leading, best, tried[KINDS[0]], tried[KINDS[1]])

    def _known(self, place: int) -> list[Trial]:
        """Return the trials whose results the proposal for a place may use."""
        return [t for t in self._all if t.place <= place - self._ahead or (t.free and t.place <= place)]

    def _counted(self, kind: str, place: int | None = None) -> list[Trial]:
        """Return the trials that count, so that both kinds have equally many: those not known to be refused at a place."""
        last = len(self._all) if place is None else place - self._ahead
        return [t for t in self._of(kind) if not t.free and not (t.refused and t.place <= last)]

    def _known_refusal(self, kind: str, choices: Choices, refused: Mapping[frozenset[str], str]) -> str | None:
        names = frozenset(choices.techniques)
        if kind == KINDS[0]:
            return None
        if not names:
            return "no technique is on, which is the baseline"
        if len(names) > self.space.most:
            return f"{len(names)} techniques, of which at most {self.space.most} are combined"
        clash = self.space.conflict(names)
        if clash is not None:
            return f"{' and '.join(sorted(clash[0]))}: {clash[1]}"
        return next((why for stack, why in refused.items() if stack <= names), None)

    # -- one run

    def _outcome(self, choices: Choices, budget: float) -> Outcome:
        """Return the outcome of a run, from disk if it is there."""
        file = self.folder / "outcomes" / f"{choices.key}-{budget:g}.json"
        if file.is_file():
            return Outcome(**json.loads(file.read_text()))
        began = time.monotonic()
        outcome = self.run(choices, budget)
        if self._stopped.is_set():
            raise InterruptedError("the search was stopped")
        if outcome.over:
            return outcome
        if outcome.value is not None and not math.isfinite(outcome.value):
            outcome = Outcome(None, f"the target is {outcome.value}")
        outcome = replace(outcome, seconds=time.monotonic() - began)
        write_json(file, asdict(outcome))
        return outcome

    def _save(self) -> None:
        write_json(self._file, {"ahead": self._ahead, "trials": [trial.record() for trial in self._all]})
        self._save_clock()

    def _save_clock(self) -> None:
        write_json(self._clock, {"seconds": self.spent})

    # -- the results

    def _of(self, kind: str) -> list[Trial]:
        return [trial for trial in self._all if trial.kind == kind]

    def _sorted(self, trials: list[Trial]) -> list[Trial]:
        return sorted(trials, key=lambda trial: trial.values[RUNGS[-1]], reverse=self.mode == "max")

    def trials(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return every trial in order: kind, number, choices, state, value, values at each fraction, and why it ended."""
        return [
            {
                "kind": trial.kind,
                "number": trial.number,
                "choices": trial.choices.record(),
                "state": trial.state,
                "value": trial.value,
                "values": {f"1/{RUNGS[-1] // rung}": value for rung, value in trial.values.items()},
                "peak_bytes": trial.peak_bytes,
                "why": trial.why,
                "refused": trial.refused,
                "free": trial.free,
            }
            for name in (KINDS if kind is None else (kind,))
            for trial in self._of(name)
        ]

    def history(self) -> list[dict[str, Any]]:
        """Return the trials that ran, in the order of their ends: seconds of the search, kind, number, and value or None."""
        over = [trial for trial in self._all if trial.ended is not None and not trial.free]
        over.sort(key=lambda trial: (trial.ended or 0.0, trial.place))
        return [{"seconds": t.ended, "kind": t.kind, "number": t.number, "value": t.value} for t in over]

    def ranked(self, kind: str) -> list[dict[str, Any]]:
        """Return the trials that had the whole budget, the best first."""
        whole = [record for record in self.trials(kind) if record["value"] is not None]
        return sorted(whole, key=lambda record: record["value"], reverse=self.mode == "max")

    def best(self, kind: str) -> dict[str, Any] | None:
        """Return the best of :meth:`ranked`, or None."""
        return next(iter(self.ranked(kind)), None)


def _ahead(jobs: int) -> int:
    """Return how many trials may be active with so many jobs. Some of them wait for others."""
    return AHEAD if jobs <= 2 else 2 * jobs


def _rung(trial: Trial) -> int:
    """Return the rung at which an active trial runs, or runs next."""
    return next(rung for rung in RUNGS if rung not in trial.values)


def chosen(record: Mapping[str, Any]) -> Choices:
    """Return the choices in a trial's record."""
    return Choices.of(record["choices"])
