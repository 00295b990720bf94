"""Check the arms of a bench with a few steps each, and estimate how long the bench takes."""

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_eff.bench import calibration
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Budget, Incomparable, Pace
from lightning_eff.bench.reports.report import fitting, grid, wrapped
from lightning_eff.bench.reports.words import Column, number
from lightning_eff.bench.running.jobs import Job, work

STEPS = 8  #: the optimizer steps of a check
SECONDS = 8.0  #: the time for the checks of all arms
LEAST = 2.0  #: the least time for the check of an arm

PaceOf = Callable[..., Pace]


@dataclass(frozen=True)
class Checked:
    """The check of one arm.

    Attributes:
        arm: the arm.
        status: "ok", "refused", "crashed", "diverged" or "late".
        text: the reason, or an empty text.
        step: the seconds of an optimizer step, or None.
        start: the seconds before the first step.
        validation: the seconds of a validation.
    """

    arm: Arm
    status: str
    text: str = ""
    step: float | None = None
    start: float = 0.0
    validation: float = 0.0


@dataclass(frozen=True)
class Checks:
    """Check every arm of a bench with a few steps, within a limited time.

    Attributes:
        pace: returns the pace of an arm, from the arm and further settings of :class:`Pace`.
        budget: the budget of a run.
        seed: the seed of the first run.
        threads: the number of torch threads.
        other_training_data: whether arms may train on other data than the baseline.
        seconds: the time for all arms. An arm that needs more than its part is not checked further.
    """

    pace: PaceOf
    budget: Budget
    seed: int
    threads: int
    other_training_data: bool
    seconds: float = SECONDS

    def of(self, arms: Sequence[Arm]) -> list[Checked]:
        """Return the check of each arm.

        Raises:
            Incomparable: if the baseline cannot be measured, or does not log the target.
            RuntimeError: if the baseline crashes or diverges.
        """
        baseline, start = arms[0], time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):  # modules may print
            first = self._rehearsed(baseline, STEPS, check_target=True)
            if first["status"] == "refused":
                raise Incomparable(f"{baseline.name}: {first['error']}")
            calibration.stop_if_failed(first)
            step = _step_seconds(first)
            calibration.check_length(baseline.name, self.budget.seconds, step)
            steps = max(STEPS, round(self.budget.seconds / step))
            found: list[Checked] = []
            probes: list[dict[str, Any]] = []
            for left, arm in zip(range(len(arms), 0, -1), arms, strict=True):
                usual = 2 * probes[0]["total_seconds"] if probes else 0.0
                patience = max(LEAST, usual, (self.seconds - (time.monotonic() - start)) / left)
                probes.append(self._rehearsed(arm, steps, inspect=True, patience=patience if found else None))
                found.append(self._checked(arm, probes[0], probes[-1], steps, patience))
        return found

    def _rehearsed(self, arm: Arm, steps: int, *, patience: float | None = None, **more: Any) -> dict[str, Any]:
        pace = self.pace(arm, steps=steps, sweep=STEPS, **more)
        return work(Job(arm, self.seed, pace, "dry-run", self.threads, patience=patience))

    def _checked(
        self, arm: Arm, baseline: dict[str, Any], probe: dict[str, Any], steps: int, patience: float
    ) -> Checked:
        if probe["status"] == "late":
            return Checked(arm, "late", f"{arm.name} was not checked further after {patience:.0f} s.")
        if probe["status"] != "finished":
            return Checked(arm, probe["status"], f"{arm.name}: {probe['error']}")
        seconds = _step_seconds(probe)
        validation = probe["validation_seconds"]
        costs = seconds, max(0.0, probe["total_seconds"] - sum(probe["times"]) - validation), validation
        try:
            if probe is baseline:
                calibration.check_rate(arm.name, probe["lr"], steps)
            else:
                calibration.check_same(arm.name, baseline, probe, other_training_data=self.other_training_data)
        except Incomparable as error:
            return Checked(arm, "refused", str(error), *costs)
        return Checked(arm, "ok", "", *costs)


def _step_seconds(record: dict[str, Any]) -> float:
    """Return the seconds of an optimizer step, without the first batches."""
    times = record["times"][2:] or record["times"]
    return median(times) * len(record["times"]) / max(record["steps"], 1)


def estimate(
    found: Sequence[Checked],
    arms: Sequence[Arm],
    budget: float,
    *,
    seeds: int,
    rounds: int,
    jobs: int,
    evaluations: int,
) -> float:
    """Estimate the seconds of the whole bench. Arms without a measured step count like the baseline.

    Args:
        found: the checks, the baseline's first.
        arms: all arms, ladder arms included.
        budget: the seconds of a run.
        seeds: the number of seeds.
        rounds: the number of rehearsal rounds.
        jobs: the number of parallel runs.
        evaluations: the number of validations per run.
    """
    baseline = found[0]
    checks = {one.arm.name: one if one.step is not None else baseline for one in found}
    each = [(arm.factor, checks.get(arm.name, baseline)) for arm in arms]
    runs = sum(factor * budget + one.start + evaluations * one.validation for factor, one in each)
    sweep = calibration.sweep_steps(budget, baseline.step or 1.0)
    rehearsals = sum((1 + rounds) * (sweep * (one.step or 1.0) + one.start) + one.validation for one in checks.values())
    return runs * seeds / jobs + rehearsals


def text(found: Sequence[Checked], seconds: float, plan: str, width: int) -> str:
    """Format the checks for a terminal: a row per arm, the problems, and the estimated time.

    Args:
        found: the checks, the baseline's first.
        seconds: the estimated time of the bench.
        plan: the plan in a line.
        width: the terminal's width in characters.
    """
    width = fitting(width)
    columns = [
        Column("kind", "kind"),
        Column("status", "check"),
        Column("step", "step"),
        Column("techniques", "techniques"),
    ]
    rows = [
        {
            "arm": one.arm.name,
            "kind": one.arm.kind,
            "status": "not finished" if one.status == "late" else one.status,
            "step": "–" if one.step is None else f"{number(1000 * one.step, 3)} ms",
            "techniques": one.arm.description if one.arm.kind == "recipe" else "–",
        }
        for one in found
    ]
    problems = [wrapped(one.text, width, bullet="- ") for one in found if one.text]
    minutes = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    parts = [wrapped(plan, width), "", grid(columns, rows, width), *([""] if problems else []), *problems]
    return "\n".join([*parts, "", f"The bench takes about {minutes} on this machine. Start it without --dry-run."])
