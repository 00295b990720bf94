"""One trial of a search on the user's module: rehearsed beside the baseline, checked for honesty, and run."""

import json
import math
import time
from collections.abc import Mapping
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
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.places import Places
from lightning_eff.tune.arguments import too_much
from lightning_eff.tune.config import Choices, Recipes
from lightning_eff.tune.honesty import early, leaks, mismeasures, peeks
from lightning_eff.tune.inspection.probing import reason
from lightning_eff.tune.inspection.profiling import Found
from lightning_eff.tune.search import Outcome

EVALUATIONS = 4  # validations of a run
SLACK = 1.5  # times what a run tells of its seconds may have passed from its first to its last step by another clock
PAUSE = 1.0  # and so many seconds more
FEW = 2  # steps of the baseline, before the weights of another run take its weights' place


class Trials:
    """Trains what a search has chosen, in reference-system time.

    Each choice rehearses once beside the baseline, in turns, which gives the price of its steps in the seconds of the
    baseline's profile, and shows whether it has the baseline's data and model. Then a run at any budget spends that budget
    at these prices. What it tells of its time is held against the clock of this process.

    Args:
        recipes: writes choices as configs.
        found: the baseline's profile.
        places: where runs are trained.
        folder: for configs and rehearsals.
        target: the validation metric.
        budget: seconds of a whole run.
        seed: of all runs.
        threads: torch's in each.
        memory: bytes that a run may use; None leaves that open.
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
    ) -> None:
        self.recipes, self.found, self.places, self.folder = recipes, found, places, folder
        self.target, self.budget, self.seed, self.threads, self.memory = target, budget, seed, threads, memory
        self._reference = calibration.prices_of_one(found.probe)
        self._overlap = found.probe.get("overlap", {})
        self._durations = found.durations(budget, 0.0, 1, 1)
        self._usual = 1.0  # seconds by this process's clock for each that the baseline tells of
        self._blind: set[frozenset[str]] = set()  # stacks that take nothing from validation data
        self._faithful: set[str] = set()  # the user's callbacks, with settings, that measure what the baseline does
        (folder / "rehearsals").mkdir(parents=True, exist_ok=True)
        self._paths = Arm("baseline", "baseline", recipes.paths)

    def __call__(self, choices: Choices, budget: float) -> Outcome:
        """What becomes of a run."""
        try:
            rehearsal = self._rehearsed(choices)
        except (ValueError, TypeError) as error:  # a constructor, or what makes two arms incomparable
            return Outcome(None, str(error), refused=isinstance(error, Incomparable))
        if rehearsal["status"] != "finished":
            why = f"{rehearsal['status']} in its rehearsal: {rehearsal['error']}"
            return Outcome(None, why, refused=rehearsal["refused"], crashed=rehearsal["status"] == "crashed")
        prices = {price["kind"]: price["seconds"] for price in rehearsal["prices"]}
        steps = calibration.steps_in(budget, rehearsal, prices)
        arm = self._arm(choices, steps)
        pace = Pace(
            self.target,
            budget=budget,
            reference=True,
            prices=prices,
            common=[price["kind"] for price in self._reference],
            steps=steps,
            evaluations=EVALUATIONS,
            watch=True,
        )
        heard: list[float] = []  # when steps were told of, by the clock of this process
        took = self._durations.start + budget + EVALUATIONS * self._durations.validation
        job = Job(arm, self.seed, pace, f"{choices.key}-{budget:g}", self.threads, self._durations.limit(took))
        (record,) = self.places.do([job], lambda job, u: heard.append(time.perf_counter()))
        outer = record.get("heard_seconds", heard[-1] - heard[0] if heard else 0.0)  # another machine heard it
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
        else:  # nobody is there who could tell what is not so
            self._usual = max(self._usual, outer / max(_inner(record), 1e-9))
        peak = int(record["peak_memory_bytes"])
        if (why := too_much(peak, self.memory)) is not None:
            return Outcome(None, why, peak_bytes=peak)
        return Outcome(float(record["points"][-1]["metric"]), peak_bytes=peak)

    def rehearsed(self, choices: Choices) -> bool:
        """Whether the prices of these choices' steps are known."""
        return self._file(choices).is_file()

    def steps(self, choices: Choices) -> int:
        """Optimizer steps that the whole budget holds; the baseline's, as it is, where these choices do not rehearse."""
        try:
            rehearsal = self._rehearsed(choices)
        except (ValueError, TypeError):
            return self.found.steps
        if rehearsal["status"] != "finished":
            return self.found.steps
        prices = {price["kind"]: price["seconds"] for price in rehearsal["prices"]}
        return calibration.steps_in(self.budget, rehearsal, prices)

    def _file(self, choices: Choices) -> Path:
        return self.folder / "rehearsals" / f"{choices.key}.json"

    def _arm(self, choices: Choices, steps: int) -> Arm:
        return self.recipes.arm("trial", choices, steps, self.folder / "configs")

    def _rehearsed(self, choices: Choices) -> dict[str, Any]:
        """Prices of a choice's steps, and what its steps are; as it is on disk, or as it comes out."""
        file = self._file(choices)
        if file.is_file():
            return json.loads(file.read_text())
        steps = self.found.steps
        sweep = calibration.sweep_steps(self.budget, self.found.step_seconds)
        again = Pace(self.target, steps=steps, sweep=sweep, watch=True, schedule=self.found.schedule)
        pace = Pace(self.target, steps=steps, sweep=sweep, inspect=True, watch=True)
        limit = self._durations.limit(2 * self._durations.rehearsal + self._durations.validation)
        jobs = [
            Job(self._paths, self.seed, again, "baseline-again", self.threads, limit),
            Job(self._arm(choices, steps), self.seed, pace, f"{choices.key}-rehearsal", self.threads, limit),
        ]
        baseline, own = self.places.do(jobs)
        calibration.stop_if_failed(baseline)
        record: dict[str, Any] = {"status": own["status"], "error": own["error"], "refused": False}
        if own["status"] == "finished":
            self._check(choices, own)
            why = (
                peeks(own["overlap"], self._overlap) or self._leak(choices, jobs[1], own) or self._unfaithful(choices)
                if choices.techniques
                else None
            )
            if why is not None:
                raise Incomparable(f"{choices.told()}: {why}")
            scale = mean_cost(self._reference) / mean_cost(calibration.prices_of_one(baseline))
            record |= {
                "prices": [{**price, "seconds": price["seconds"] * scale} for price in calibration.prices_of_one(own)],
                "kinds": own["kinds"],
                "steps": own["steps"],
                "parameters": own["facts"]["parameters"],
            }
        else:
            record["error"] = reason(own)
            record["refused"] = own["status"] == "refused"
        write_json(file, record)
        return record

    def _leak(self, choices: Choices, job: Job, own: Mapping[str, Any]) -> str | None:
        """Why a stack, rehearsed with other validation data, learns from it; asked once of each stack."""
        stack = frozenset(choices.techniques)
        if stack in self._blind:
            return None
        other = replace(job, pace=replace(job.pace, inspect=False, watch=False, blind=True), name=f"{job.name}-blind")
        (blind,) = self.places.do([other])
        if blind["status"] == "crashed":  # once may be chance
            (blind,) = self.places.do([other])
        if blind["status"] != "finished":
            return f"it does not train with other validation data ({blind['status']}: {reason(blind)}); expected the same run"
        why = leaks(own["losses"], blind["losses"])
        if why is not None:  # or does it train otherwise each time?
            (again,) = self.places.do([replace(job, name=f"{job.name}-again")])
            why = why if leaks(own["losses"], again["losses"]) is None else None
        if why is None:
            self._blind.add(stack)
        return why

    def _unfaithful(self, choices: Choices) -> str | None:
        """Why a callback of the user's measures something else, or trains while no clock runs; asked once of each setting."""
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
        """Whether a callback is known to be faithful, and why it is not.

        What is logged at the end of its rehearsal is held against what the baseline logs of the same weights. Where one of
        the two crashes nothing is known.

        Args:
            choices: the callback by itself.
            cls: its class.
            name: for files, and of no other trial that is under way.
        """
        file = self.folder / "rehearsals" / f"{name}.pt"
        sweep = calibration.sweep_steps(self.budget, self.found.step_seconds)
        keeping = Pace(self.target, steps=self.found.steps, sweep=sweep, inspect=True, watch=True, keep=str(file))
        taking = replace(keeping, sweep=FEW, watch=False, keep=None, take=str(file))
        limit = self._durations.limit(self._durations.rehearsal + self._durations.validation)
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
            return False, f"its weights are none of the baseline's model ({reason(baseline)}); expected the same model"
        if baseline["status"] != "finished":
            return False, None
        return True, mismeasures(own["metrics"][self.target], baseline["metrics"][self.target])

    def _done(self, choices: Choices, pace: Pace, name: str, limit: float) -> dict[str, Any]:
        job = Job(self._arm(choices, pace.steps), self.seed, pace, name, self.threads, limit)
        return self.places.do([job])[0]

    def _check(self, choices: Choices, own: Mapping[str, Any]) -> None:
        """Raise :class:`Incomparable` where a choice has other data or another model than the baseline."""
        calibration.check_same(choices.told(), self.found.probe, own, other_training_data=None)
        makes_others = any(
            issubclass(self.recipes.space.techniques[name].cls, Architecture) for name in choices.techniques
        )
        ours, theirs = own["facts"], self.found.probe["facts"]
        for what in ("model", "parameters"):
            if ours[what] != theirs[what] and not makes_others:
                raise Incomparable(
                    f"{choices.told()}: got a module of {what} {ours[what]}, other than the baseline's {theirs[what]}; expected"
                    " the same model, since none of its techniques says that it makes another one."
                )


def _inner(record: Mapping[str, Any]) -> float:
    """Seconds that a run tells of."""
    return math.fsum(record[name] for name in ("wall_seconds", "warmup_seconds", "validation_seconds"))


def dishonest(
    record: Mapping[str, Any],
    prices: Mapping[str, float],
    budget: float,
    outer: float,
    usual: float = 1.0,
    batches: float = 1.0,
) -> str | None:
    """Why what a run tells of its time cannot be; None where it can.

    Args:
        record: of the run.
        prices: of its kinds of steps, in seconds.
        budget: in seconds.
        outer: seconds from its first step to its last, by a clock that is not its own.
        usual: how many times what it tells of has passed on that clock in the baseline's own runs; on a busy machine, more.
        batches: of an optimizer step: a run ends with a whole one.
    """
    inner = _inner(record)
    if outer > PAUSE + SLACK * max(usual, 1.0) * inner:
        return f"it tells of {inner:.3g} s, and took {outer:.3g} s by another clock"
    paid = math.fsum(prices.get(kind["kind"], 0.0) * kind["count"] for kind in record["kinds"])
    if paid > 1.1 * budget + max(batches, 1.0) * max(prices.values(), default=0.0):
        return f"its steps cost {paid:.3g} s at their prices, of a budget of {budget:.3g} s"
    return None
