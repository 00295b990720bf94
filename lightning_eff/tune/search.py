"""The search: what is tried is proposed in one order, runs side by side, and is decided on in that order."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_eff.bench.results import write_json
from lightning_eff.tune.config import Choices
from lightning_eff.tune.proposals.proposing import (
    FACTOR,
    KINDS,
    RUNGS,
    Proposer,
    Trial,
    goes_on,
    renewed,
    require_extra,
)
from lightning_eff.tune.space import Space

__all__ = ["FACTOR", "KINDS", "RUNGS", "Outcome", "Run", "Search", "chosen", "require_extra"]

STARTUP = 10  # trials of each kind that are drawn, before the sampler goes by them and what leads is renewed
FREE = 30  # refusals on end that cost no run, after which a stack is drawn afresh
CRASHES = 2  # of a stack, with different settings, after which it is not tried again
AHEAD = 3  # trials that may be under way together, one or two of which run; none of them knows what came of another


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        value: the target at its end; None where it did not get there.
        why: the reason where it did not.
        refused: this stack cannot train here at all, with whatever settings.
        crashed: it did not train with these settings; others may.
        seconds: it took, with all that belongs to it.
        peak_bytes: of memory; None where it is not known.
    """

    value: float | None
    why: str | None = None
    refused: bool = False
    crashed: bool = False
    seconds: float = 0.0
    peak_bytes: int | None = None


class Run(Protocol):
    """Trains what was chosen over a budget of seconds, the rate decayed wholly on it."""

    def __call__(self, choices: Choices, budget: float) -> Outcome: ...


class Search:
    """Trials of the baseline's own settings and of recipes, as many of one kind as of the other, until time is over.

    A trial runs at a ninth of the budget, then at a third, then at all of it; on each it is held against the others of its
    kind that were begun before it and came as far, and goes on if it is in their best third.

    The trials are the same one by one and two at once, on one machine or two, and whichever ends first: each is proposed
    from what came of all before it but the last ``AHEAD``, and waits at each budget for those before it. More than two at
    once look further ahead, so that there is something for each, and so have other trials, which are the same for as many
    on whatever machines. A search that was interrupted goes on: every run's outcome is on disk, and a trial that was under
    way is taken up again.

    Args:
        space: what may be chosen.
        run: trains a trial; called from several threads.
        folder: for the trials and the runs' outcomes.
        mode: "min" or "max".
        budget: seconds of a whole run.
        seconds: of the search, over all times that it is gone on with.
        seed: of all that is drawn.
        jobs: runs at once.
        limit: trials of each kind at most; None for what the time holds.
        tell: called with a line for people as a trial begins and as it ends.
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
        self._longest = clock.get("longest", 0.0)  # seconds of a trial
        self._began = time.monotonic()
        self._stopped = threading.Event()
        found = json.loads(self._file.read_text()) if self._file.is_file() else {"ahead": _ahead(jobs), "trials": []}
        self._ahead: int = found["ahead"]
        self._all = [Trial.of(record) for record in found["trials"]]
        self._started: dict[int, float] = {}  # when trials were taken up, by place

    # -- the whole

    @property
    def spent(self) -> float:
        """Seconds of the search so far."""
        return self._before + time.monotonic() - self._began

    def search(self) -> None:
        """Try until the time, or the number of trials, is used up.

        Raises:
            RuntimeError: if no trial of the baseline came to its end.
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
                    self._started.setdefault(trial.place, time.monotonic())
                    future = pool.submit(self._outcome, trial.choices, self.budget * rung / RUNGS[-1])
                    under_way[future] = following
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    trial, rung = under_way.pop(future)
                    heard[trial.place, rung] = future.result()
        except BaseException:
            self._stopped.set()  # what comes of runs that are ended from outside is no outcome
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            self._save_clock()
        pool.shutdown()
        if self.best("baseline") is None:
            ended = [record for record in self.trials("baseline") if record["why"]]
            said = f"the last said: {ended[-1]['why']}" if ended else "the search was too short"
            raise RuntimeError(
                f"None of the baseline's {len(self.trials('baseline'))} trials came to its end; {said}. {_advice(ended)}"
            )

    def _decide(self, heard: Mapping[tuple[int, int], Outcome]) -> None:
        """End the trials whose last run says so, or pass them on; in their order, each once those before it came as far."""
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
                elif not goes_on(outcome.value, [o.values[rung] for o in earlier if rung in o.values], self.mode):
                    trial.why = f"not in the best third at 1/{RUNGS[-1] // rung} of the budget"
                    self._end(
                        trial, "pruned", f"{outcome.value:.5g} at 1/{RUNGS[-1] // rung} of the budget, left there"
                    )

    def _end(self, trial: Trial, state: str, said: str) -> None:
        trial.state, trial.ended = state, self.spent
        self._longest = max(self._longest, time.monotonic() - self._started[trial.place])
        self._save()
        bests = [f"{kind} {best['value']:.5g}" for kind in KINDS if (best := self.best(kind)) is not None]
        self._tell(
            f"{trial.kind} {trial.number + 1}: {trial.choices.told()}: {said}; best so far: {', '.join(bests) or 'none'};"
            f" {self.spent:.0f} s of {self.seconds:.0f} s"
        )

    def _next(
        self,
        kinds: tuple[str, ...],
        heard: Mapping[tuple[int, int], Outcome],
        under_way: Mapping[Any, tuple[Trial, int]],
    ) -> tuple[Trial, int] | None:
        """The next run: of the first trial that may go on, or else of a new one; None where all must wait or time is over."""
        busy = {trial.place for trial, _ in under_way.values()}
        same = {(trial.choices.key, rung) for trial, rung in under_way.values()}

        def free(trial: Trial) -> bool:
            rung = _rung(trial)
            known = trial.place in busy or (trial.place, rung) in heard
            return not known and (trial.choices.key, rung) not in same  # the same run is waited for

        running = [trial for trial in self._all if trial.state == "running"]
        place = sum(not trial.free for trial in self._all)
        following = next(filter(free, running), None)
        if following is None and not (running and running[0].place <= place - self._ahead):
            begun = self._begun(kinds, place, bool(running))
            following = begun if begun is not None and free(begun) else None
        return None if following is None else (following, _rung(following))

    # -- a new trial

    def _begun(self, kinds: tuple[str, ...], place: int, waiting: bool) -> Trial | None:
        """The trial of a place, unless time or the number of trials is used up, or whatever is drawn is refused."""
        tried = min(sum(not trial.free for trial in self._of(kind)) for kind in kinds) > 0
        if self.spent + self._longest > self.seconds and tried:
            return None
        counts = {kind: len(self._counted(kind, place)) for kind in kinds}
        kind = min(kinds, key=lambda one: counts[one])
        if self.limit is not None and counts[kind] >= self.limit:
            counts = {kind: len(self._counted(kind)) for kind in kinds}
            kind = min(kinds, key=lambda one: counts[one])
            if waiting or counts[kind] >= self.limit:
                return None
        known = self._known(place)
        refused = _refused(known)
        best = self._leading(known, KINDS[0])
        again = self._renewed(known, best) if kind != KINDS[0] and counts[kind] >= STARTUP else None
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
                self._tell(f"{kind} {number + 1}: trying {choices.told()}")
                return trial
            trial.state, trial.free, trial.ended = "pruned", True, self.spent
            free, again = free + 1, None
        self._save()
        return None

    def _leading(self, known: list[Trial], kind: str) -> Choices | None:
        """The best choices of those that are known to have had the whole budget."""
        complete = [trial for trial in known if trial.kind == kind and trial.value is not None]
        return self._sorted(complete)[0].choices if complete else None

    def _renewed(self, known: list[Trial], best: Choices | None) -> Choices | None:
        """The leading recipe on the baseline's best settings, where these came later."""
        leading = self._leading(known, KINDS[1])
        if leading is None or best is None:
            return None
        tried = {kind: [trial.choices for trial in self._of(kind)] for kind in KINDS}
        return renewed(leading, best, tried[KINDS[0]], tried[KINDS[1]])

    def _known(self, place: int) -> list[Trial]:
        """Trials whose outcome is known to what is proposed for a place."""
        return [t for t in self._all if t.place <= place - self._ahead or (t.free and t.place <= place)]

    def _counted(self, kind: str, place: int | None = None) -> list[Trial]:
        """Trials that were not refused, as far as is known to a place: of them both kinds have as many."""
        last = len(self._all) if place is None else place - self._ahead
        return [t for t in self._of(kind) if not t.free and not (t.refused and t.place <= last)]

    def _known_refusal(self, kind: str, choices: Choices, refused: Mapping[frozenset[str], str]) -> str | None:
        names = frozenset(choices.techniques)
        if kind == KINDS[0]:
            return None
        if not names:
            return "no technique is on, which is the baseline"
        if len(names) > self.space.most:
            return f"{len(names)} techniques; at most {self.space.most} are tried together"
        clash = self.space.conflict(names)
        if clash is not None:
            return f"{' and '.join(sorted(clash[0]))}: {clash[1]}"
        return next((why for stack, why in refused.items() if stack <= names), None)

    # -- one run

    def _outcome(self, choices: Choices, budget: float) -> Outcome:
        """What became of a run: as it is on disk, or as it comes out."""
        file = self.folder / "outcomes" / f"{choices.key}-{budget:g}.json"
        if file.is_file():
            return Outcome(**json.loads(file.read_text()))
        began = time.monotonic()
        outcome = self.run(choices, budget)
        if self._stopped.is_set():
            raise InterruptedError("the search was stopped")
        if outcome.value is not None and not math.isfinite(outcome.value):
            outcome = Outcome(None, f"the target is {outcome.value}")
        write_json(file, asdict(outcome) | {"seconds": time.monotonic() - began})
        return outcome

    def _save(self) -> None:
        write_json(self._file, {"ahead": self._ahead, "trials": [trial.record() for trial in self._all]})
        self._save_clock()

    def _save_clock(self) -> None:
        write_json(self._clock, {"seconds": self.spent, "longest": self._longest})

    # -- what was found

    def _of(self, kind: str) -> list[Trial]:
        return [trial for trial in self._all if trial.kind == kind]

    def _sorted(self, trials: list[Trial]) -> list[Trial]:
        return sorted(trials, key=lambda trial: trial.values[RUNGS[-1]], reverse=self.mode == "max")

    def trials(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Every trial, in order: its kind, number, choices, state, value, values at each share, and why it ended."""
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
        """The trials for which something ran, as they ended: seconds of the search, kind, number, and value or None."""
        over = [trial for trial in self._all if trial.ended is not None and not trial.free]
        over.sort(key=lambda trial: (trial.ended or 0.0, trial.place))
        return [{"seconds": t.ended, "kind": t.kind, "number": t.number, "value": t.value} for t in over]

    def ranked(self, kind: str) -> list[dict[str, Any]]:
        """The trials that had the whole budget, the best first."""
        whole = [record for record in self.trials(kind) if record["value"] is not None]
        return sorted(whole, key=lambda record: record["value"], reverse=self.mode == "max")

    def best(self, kind: str) -> dict[str, Any] | None:
        """The best of :meth:`ranked`."""
        return next(iter(self.ranked(kind)), None)


def _refused(trials: Iterable[Trial]) -> dict[frozenset[str], str]:
    """The stacks that cannot train, with the reason: those that were refused, and those that crashed with two settings."""
    found: dict[frozenset[str], str] = {}
    crashes: dict[frozenset[str], set[str]] = {}
    for trial in trials:
        stack = frozenset(trial.choices.techniques)
        if trial.crashed:
            crashes.setdefault(stack, set()).add(trial.choices.key)
        if stack and (trial.refused or len(crashes.get(stack, ())) >= CRASHES):
            found[stack] = str(trial.why)
    return found


def _ahead(jobs: int) -> int:
    """How many trials may be under way where so many run at once; some of them wait for others."""
    return AHEAD if jobs <= 2 else 2 * jobs


def _advice(ended: Sequence[Mapping[str, Any]]) -> str:
    """What may help where no trial of the baseline came to its end, by the last that ended."""
    why = str(ended[-1]["why"]) if ended else ""
    if why.startswith("it used"):
        return "Allow more by --memory, or name smaller batches in a space file under own: {batch: [...]}."
    if why.startswith("crashed") or (ended and ended[-1]["refused"]):
        return "Mend what it tells of, and search again in another folder, by --out."
    return (
        "Lower the rates that are tried, in a space file under own: {rate: {low: ..., high: ..., log: true}}, or give more"
        " --search."
    )


def _rung(trial: Trial) -> int:
    """The share of the budget that a trial which is under way has next, or is at."""
    return next(rung for rung in RUNGS if rung not in trial.values)


def chosen(record: Mapping[str, Any]) -> Choices:
    """The choices of a trial's record."""
    return Choices.of(record["choices"])
