"""One trial of a search on the user's module: rehearsed together with the baseline, checked for honesty, and run."""

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_eff._core._architecture.technique import Architecture
from lightning_eff._core.technique import Technique
from lightning_eff.bench import calibration
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Incomparable, Pace
from lightning_eff.bench.references import mean_cost
from lightning_eff.bench.results import write_json
from lightning_eff.bench.running.jobs import KILLED, Job
from lightning_eff.bench.running.places import Places
from lightning_eff.tune.arguments import too_much
from lightning_eff.tune.config import Choices, Recipes
from lightning_eff.tune.honesty import early, leaks, mismeasures, peeks
from lightning_eff.tune.inspection.probing import reason
from lightning_eff.tune.inspection.profiling import Found
from lightning_eff.tune.search import FACTOR, Outcome
from lightning_eff.tune.timing import SEARCHED

SLACK = 1.5  # a run may take this many times the seconds that it reports
PAUSE = 1.0  # and this many seconds more
FEW = 2  # steps that the baseline makes before the weights of another run replace its own
AGAIN = 2  # a run that was begun in time may take this many times its expected time


class Trials:
    """Trains the choices of a search in reference-system time.

    Choices rehearse once, in turns with the baseline. The rehearsal gives the cost of their steps in the seconds of the
    baseline's profile, and shows whether they have the baseline's data and model. Choices that differ only in settings that
    do not change the cost of a step share a rehearsal. A run then spends its budget at these costs. The time that it reports
    is compared with the clock of this process.

    Args:
        recipes: writes choices as configs.
        found: the baseline's profile.
        places: the processes in which runs are trained.
        folder: the folder for configs and rehearsals.
        target: the validation metric.
        budget: the seconds of a whole run.
        seed: the seed of all runs.
        threads: the number of torch threads per run.
        memory: the bytes that a run may use. None sets no limit.
        left: returns the seconds that are left for trials.
    """

    def __init__(
        self,
        recipes: Recipes,
        found: Found,
        places: Places,
        folder: Path,
        *,
        target: str,
        budget: float,
        seed: int,
        threads: int,
        memory: int | None = None,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.recipes, self.found, self.places, self.folder = recipes, found, places, folder
        self.target, self.budget, self.seed, self.threads, self.memory = target, budget, seed, threads, memory
        self.left = left
        self._reference = calibration.prices_of_one(found.probe)
        self._overlap = found.probe.get("overlap", {})
        self._durations = found.durations(budget, 0.0, 1, 1)
        self._usual = 1.0  # seconds on this process's clock for each second that the baseline reports
        self._blind: set[frozenset[str]] = set()  # recipes that do not learn from validation data
        self._faithful: set[str] = set()  # settings of the user's callbacks that measure what the baseline measures
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # one per rehearsal
        self._lock = threading.Lock()
        (folder / "rehearsals").mkdir(parents=True, exist_ok=True)
        self._paths = Arm("baseline", "baseline", recipes.paths)

    def __call__(self, choices: Choices, budget: float) -> Outcome:
        """Train these choices for so many seconds, and return the outcome."""
        try:
            rehearsal = self._rehearsed(choices)
        except TimeoutError:
            return Outcome(None, over=True)
        except (ValueError, TypeError) as error:  # a constructor, or arms that cannot be compared
            return Outcome(None, str(error), refused=isinstance(error, Incomparable))
        if rehearsal["status"] != "finished":
            why = f"{rehearsal['status']} in its rehearsal: {rehearsal['error']}"
            return Outcome(None, why, refused=rehearsal["refused"], crashed=rehearsal["status"] == "crashed")
        if budget > 1.5 * self.budget / FACTOR**2 and (why := self._leak(choices, rehearsal)) is not None:
            return Outcome(None, f"{choices.describe()}: {why}", refused=True)
        prices = {price["kind"]: price["seconds"] for price in rehearsal["prices"]}
        steps = calibration.steps_in(budget, rehearsal, prices)
        pace = Pace(
            self.target,
            budget=budget,
            reference=True,
            prices=prices,
            common=[price["kind"] for price in self._reference],
            steps=steps,
            evaluations=SEARCHED,
            watch=True,
        )
        heard: list[float] = []  # the times of progress reports on the clock of this process
        limit = self._limit(self._durations.run(budget / self.budget))
        job = Job(self._arm(choices, steps), self.seed, pace, f"{choices.key}-{budget:g}", self.threads, limit)
        (record,) = self.places.do([job], lambda job, u: heard.append(time.perf_counter()))
        if self._timed_out(record):
            return Outcome(None, over=True)
        outer = record.get("heard_seconds", heard[-1] - heard[0] if heard else 0.0)  # another machine's clock
        if record["status"] != "finished":
            status = record["status"]
            why = f"{status}: {reason(record)}"
            return Outcome(None, why, refused=status == "refused", crashed=status == "crashed")
        if choices.techniques:
            batches = len(rehearsal["kinds"]) / max(rehearsal["steps"], 1)
            why = dishonest(record, prices, budget, outer, self._usual, batches) or peeks(
                record["overlap"], self._overlap
            )
            if why is not None:
                return Outcome(None, why, refused=True)
        else:  # the baseline has no reason to report wrong times
            self._usual = max(self._usual, outer / max(_inner(record), 1e-9))
        peak = int(record["peak_memory_bytes"])
        if (why := too_much(peak, self.memory)) is not None:
            return Outcome(None, why, peak_bytes=peak)
        return Outcome(float(record["points"][-1]["metric"]), peak_bytes=peak)

    def rehearsed(self, choices: Choices) -> bool:
        """Whether the step costs of these choices are known."""
        return any(file.is_file() for file in self._files(choices))

    def steps(self, choices: Choices) -> int:
        """Return the optimizer steps that the whole budget holds, or the baseline's if these choices do not rehearse."""
        try:
            rehearsal = self._rehearsed(choices)
        except (ValueError, TypeError, TimeoutError):
            return self.found.steps
        if rehearsal["status"] != "finished":
            return self.found.steps
        prices = {price["kind"]: price["seconds"] for price in rehearsal["prices"]}
        return calibration.steps_in(self.budget, rehearsal, prices)

    def _limit(self, seconds: float) -> float:
        """Return the time limit of a job that should take ``seconds``, without delaying the end of the search."""
        return min(self._durations.limit(seconds), max(self.left(), AGAIN * seconds))

    def _timed_out(self, record: Mapping[str, Any]) -> bool:
        """Whether a job was ended because the time for trials was over."""
        return record["status"] == "crashed" and str(record["error"]).startswith(KILLED) and self.left() <= 0

    def _files(self, choices: Choices) -> tuple[Path, Path]:
        """Return the files of a rehearsal: its own, and the one that it shares with choices of the same step costs."""
        same = {one.name for one in self.recipes.space.own if one.same_cost}
        shared = Choices({name: value for name, value in choices.own.items() if name not in same}, choices.techniques)
        folder = self.folder / "rehearsals"
        return folder / f"{choices.key}.json", folder / f"{shared.key}-shared.json"

    def _arm(self, choices: Choices, steps: int) -> Arm:
        return self.recipes.arm("trial", choices, steps, self.folder / "configs")

    def _rehearsed(self, choices: Choices) -> dict[str, Any]:
        """Return the rehearsal of these choices, with the cost of their steps. It is read from disk if it is there.

        Raises:
            Incomparable: if they cannot be compared with the baseline.
            TimeoutError: if the time for trials was over before the rehearsal was.
        """
        own, shared = self._files(choices)
        with self._lock:
            lock = self._locks[shared.name]
        with lock:  # a parallel trial may be in the same rehearsal
            file = next((file for file in (own, shared) if file.is_file()), None)
            if file is not None:
                return json.loads(file.read_text())
            record = self._rehearse(choices)
            write_json(shared if record["status"] == "finished" else own, record)
        return record

    def _rehearse(self, choices: Choices) -> dict[str, Any]:
        jobs = self._rehearsals(choices)
        baseline, own = self.places.do(jobs)
        if self._timed_out(baseline) or self._timed_out(own):
            raise TimeoutError
        calibration.stop_if_failed(baseline)
        record: dict[str, Any] = {"status": own["status"], "error": own["error"], "refused": False}
        if own["status"] != "finished":
            return record | {"error": reason(own), "refused": own["status"] == "refused"}
        self._check(choices, own)
        record["choices"], record["losses"] = choices.record(), own["losses"]
        if choices.techniques:
            foreign = any(self.recipes.space.techniques[name].foreign for name in choices.techniques)
            why = peeks(own["overlap"], self._overlap)
            why = why or (self._leak(choices, record) if foreign else None) or self._unfaithful(choices)
            if why is not None:
                raise Incomparable(f"{choices.describe()}: {why}")
        scale = mean_cost(self._reference) / mean_cost(calibration.prices_of_one(baseline))
        return record | {
            "prices": [{**price, "seconds": price["seconds"] * scale} for price in calibration.prices_of_one(own)],
            "kinds": own["kinds"],
            "steps": own["steps"],
            "parameters": own["facts"]["parameters"],
        }

    def _rehearsals(self, choices: Choices) -> list[Job]:
        """Return the jobs of a rehearsal: the baseline once more, and these choices."""
        steps = self.found.steps
        sweep = calibration.sweep_steps(self.budget, self.found.step_seconds)
        again = Pace(self.target, steps=steps, sweep=sweep, watch=True, schedule=self.found.schedule)
        pace = Pace(self.target, steps=steps, sweep=sweep, inspect=True, watch=True)
        limit = self._limit(2 * self._durations.rehearsal + self._durations.validation)
        return [
            Job(self._paths, self.seed, again, "baseline-again", self.threads, limit),
            Job(self._arm(choices, steps), self.seed, pace, f"{choices.key}-rehearsal", self.threads, limit),
        ]

    def _leak(self, choices: Choices, rehearsal: Mapping[str, Any]) -> str | None:
        """Return why a recipe learns from validation data, or None. Each set of techniques is checked once.

        The recipe rehearses again with other validation data, and its losses must stay the same. Recipes of this package are
        checked only when they reach the second budget. Recipes with the user's callbacks are checked at once.
        """
        stack = frozenset(choices.techniques)
        if not stack or stack in self._blind:
            return None
        job = self._rehearsals(Choices.of(rehearsal["choices"]))[1]  # a shared one may have other settings
        other = replace(job, pace=replace(job.pace, inspect=False, watch=False, blind=True), name=f"{job.name}-blind")
        (blind,) = self.places.do([other])
        if blind["status"] == "crashed":  # once may be chance
            (blind,) = self.places.do([other])
        if blind["status"] != "finished":
            return f"it does not train with other validation data ({blind['status']}: {reason(blind)}); expected the same run"
        why = leaks(rehearsal["losses"], blind["losses"])
        if why is not None:  # or is its training different each time?
            (again,) = self.places.do([replace(job, name=f"{job.name}-again")])
            why = why if leaks(rehearsal["losses"], again["losses"]) is None else None
        if why is None:
            self._blind.add(stack)
        return why

    def _unfaithful(self, choices: Choices) -> str | None:
        """Return why a callback of the user measures something else or trains off the clock, or None.

        Each setting of a callback is checked once.
        """
        for name, values in choices.techniques.items():
            one, key = self.recipes.space.techniques[name], Choices(techniques={name: values}).key
            if one.foreign and key not in self._faithful:
                faithful, why = self._alone(
                    Choices(choices.own, {name: values}), one.cls, f"{choices.key}-{one.cls.__name__}"
                )
                if why is not None:
                    return f"{name}: {why}" if len(choices.techniques) > 1 else why
                self._faithful.update([key] if faithful else [])
        return None

    def _alone(self, choices: Choices, cls: Any, name: str) -> tuple[bool, str | None]:
        """Return whether a callback is known to be faithful, and why it is not.

        The metric that it logs at the end of its rehearsal is compared with the baseline's for the same weights. Nothing is
        known if one of the two crashes.

        Args:
            choices: the callback by itself.
            cls: its class.
            name: a name for files that no other running trial has.
        """
        file = self.folder / "rehearsals" / f"{name}.pt"
        sweep = calibration.sweep_steps(self.budget, self.found.step_seconds)
        keeping = Pace(self.target, steps=self.found.steps, sweep=sweep, inspect=True, watch=True, keep=str(file))
        taking = replace(keeping, sweep=FEW, watch=False, keep=None, take=str(file))
        limit = self._limit(self._durations.rehearsal + self._durations.validation)
        try:
            own = self._done(choices, keeping, f"{name}-kept", limit)
            if own["status"] != "finished":
                return False, reason(own) if own["status"] == "refused" else None
            if not issubclass(cls, Technique) and (why := early(own["ahead"], self.found.probe.get("ahead", 0))):
                return False, why
            baseline = self._done(Choices(choices.own), taking, f"{name}-taken", limit)
        finally:
            file.unlink(missing_ok=True)
        if baseline["status"] == "refused":
            return False, f"its weights do not fit the baseline's model ({reason(baseline)}); expected the same model"
        if baseline["status"] != "finished":
            return False, None
        return True, mismeasures(own["metrics"][self.target], baseline["metrics"][self.target])

    def _done(self, choices: Choices, pace: Pace, name: str, limit: float) -> dict[str, Any]:
        job = Job(self._arm(choices, pace.steps), self.seed, pace, name, self.threads, limit)
        return self.places.do([job])[0]

    def _check(self, choices: Choices, own: Mapping[str, Any]) -> None:
        """Raise :class:`Incomparable` if choices differ from the baseline in their data or model."""
        calibration.check_same(choices.describe(), self.found.probe, own, other_training_data=None)
        makes_others = any(
            issubclass(self.recipes.space.techniques[name].cls, Architecture) for name in choices.techniques
        )
        ours, theirs = own["facts"], self.found.probe["facts"]
        for what in ("model", "parameters"):
            if ours[what] != theirs[what] and not makes_others:
                raise Incomparable(
                    f"{choices.describe()}: its {what} {ours[what]} differs from the baseline's {theirs[what]}, and none of its"
                    " techniques is known to change the model. Keep the model as it is."
                )


def _inner(record: Mapping[str, Any]) -> float:
    """The seconds that a run reports."""
    return math.fsum(record[name] for name in ("wall_seconds", "warmup_seconds", "validation_seconds"))


def dishonest(
    record: Mapping[str, Any],
    prices: Mapping[str, float],
    budget: float,
    outer: float,
    usual: float = 1.0,
    batches: float = 1.0,
) -> str | None:
    """Return why the time that a run reports cannot be true, or None.

    Args:
        record: the record of the run.
        prices: the cost of each kind of step in seconds.
        budget: the budget in seconds.
        outer: the seconds from its first step to its last on another clock.
        usual: how many of these seconds pass for each reported second in the baseline's runs. A busy machine has more.
        batches: the batches per optimizer step. A run ends with a whole step.
    """
    inner = _inner(record)
    if outer > PAUSE + SLACK * max(usual, 1.0) * inner:
        return f"it reports {inner:.3g} s, and took {outer:.3g} s by another clock"
    paid = math.fsum(prices.get(kind["kind"], 0.0) * kind["count"] for kind in record["kinds"])
    if paid > 1.1 * budget + max(batches, 1.0) * max(prices.values(), default=0.0):
        return f"its steps cost {paid:.3g} s at their calibrated costs, of a budget of {budget:.3g} s"
    return None
