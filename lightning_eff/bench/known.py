"""Reuse runs of earlier benches of the same code."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.bench.arms import Arm, short
from lightning_eff.bench.references import References
from lightning_eff.bench.results import load

Record = dict[str, Any]

SETTINGS = (
    "target",
    "mode",
    "budget",
    "threads",
    "evaluations",
    "schedule",
)  # the settings of a plan that affect a run
MACHINE = ("cpu", "gpu", "torch", "lightning")


class Known:
    """Find calibrations and runs of finished benches for arms with the same configs.

    In reference-system time, configs, seed, step costs and settings determine a run completely. Runs of the baseline and of
    recipes are reused. Those of controls and ladders are not.

    Args:
        folders: the folders of the benches. If several have an arm, the first one counts.
        plan: the new bench's plan, as in its ``results.json``.
        machine: the machine's fingerprint.
        baseline: the new bench's baseline.
        reference: the new bench's step costs.

    Raises:
        FileNotFoundError: if a folder has no results.
        ValueError: if a bench has another baseline, other settings or other step costs.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        plan: Mapping[str, Any],
        machine: Mapping[str, Any],
        baseline: Arm,
        reference: References,
    ) -> None:
        self._benches = [(short(folder), load(folder)) for folder in folders]
        for folder, results in self._benches:
            theirs = results["plan"]["arms"][0]
            differs = [name for name in SETTINGS if results["plan"][name] != plan[name]]
            differs += [name for name in MACHINE if results["machine"][name] != machine[name]]
            if _identity(theirs) != _identity(baseline.record()):
                differs.append("the baseline's configs")
            elif prices := results["calibration"].get(theirs["name"], {}).get("prices"):
                differs += (
                    [] if reference.known(baseline, machine, prices) == prices else ["the step costs of the reference"]
                )
            if differs:
                raise ValueError(
                    f"Benchmark(known={folder!r}): this bench differs in {', '.join(differs)}, so its runs cannot be reused."
                    " Leave it out to train every run."
                )

    def calibrations(self, arms: Sequence[Arm]) -> dict[str, Record]:
        """Return the calibrations of the arms that an earlier bench has, by their names here."""
        found = {arm.name: self._of(arm) for arm in arms}
        return {name: known[1]["calibration"][known[2]] for name, known in found.items() if known is not None}

    def run(self, arm: Arm, seed: int) -> Record | None:
        """Return the record of an arm's finished run with a seed, or None. A note in it names the bench that trained it."""
        known = self._of(arm)
        if known is None:
            return None
        folder, results, theirs = known
        for run in results["runs"]:
            if (run["arm"], run["seed"], run["status"]) == (theirs, seed, "finished"):
                return {
                    **run,
                    "arm": arm.name,
                    "notes": [*run["notes"], f"trained for the bench in {Path(folder).name}"],
                }
        return None

    def _of(self, arm: Arm) -> tuple[str, Record, str] | None:
        """Return the first bench that has calibrated the arm: its folder, its results and the arm's name there."""
        own = _identity(arm.record())
        for folder, results in self._benches:
            for other in results["plan"]["arms"] if own is not None else ():
                if _identity(other) == own and other["name"] in results["calibration"]:
                    return folder, results, other["name"]
        return None


def _identity(arm: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what determines an arm's training: its configs without their paths, its learning rate and its warm-up.

    The result is None for arms without configs, controls and ladders.
    """
    if arm["kind"] not in ("baseline", "recipe") or not arm["configs"]:
        return None
    return (*(text.partition("\n")[2] for text in arm["configs"]), arm.get("rate"), arm.get("warm_up"))
