"""What other benches of the same code have found already, so that it need not be trained again."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.bench.arms import Arm, short
from lightning_eff.bench.references import References
from lightning_eff.bench.results import load

Record = dict[str, Any]

SETTINGS = ("target", "mode", "budget", "threads", "evaluations", "schedule")  # of a plan, which make a run what it is
MACHINE = ("cpu", "gpu", "torch", "lightning")


class Known:
    """Calibrations and runs of benches that are over, by what an arm is.

    On the reference clock a run is wholly told by its arm's configs, its seed, the prices and the bench's settings: trained
    again, it would be the same. A baseline and its recipes are taken over; controls and ladders are not.

    Args:
        folders: of the benches; where several have an arm, the first one counts.
        plan: of the bench that asks, as in its ``results.json``.
        machine: its fingerprint.
        baseline: its baseline.
        reference: the prices that it counts in.

    Raises:
        FileNotFoundError: if a folder holds no results.
        ValueError: if one holds a bench of another kind or in other prices, whose runs would be others.
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
            if _what(theirs) != _what(baseline.record()):
                differs.append("the baseline's configs")
            elif prices := results["calibration"].get(theirs["name"], {}).get("prices"):
                differs += (
                    [] if reference.known(baseline, machine, prices) == prices else ["the prices of the reference"]
                )
            if differs:
                raise ValueError(
                    f"Got the bench in {folder} as known, which differs in {', '.join(differs)}; expected one of the same"
                    " baseline with the same settings and reference on the same machine. Leave it out to train every run."
                )

    def calibrations(self, arms: Sequence[Arm]) -> dict[str, Record]:
        """The steps, prices and rates of those arms that a bench knows, by their names here."""
        found = {arm.name: self._of(arm) for arm in arms}
        return {name: known[1]["calibration"][known[2]] for name, known in found.items() if known is not None}

    def run(self, arm: Arm, seed: int) -> Record | None:
        """The record of an arm's finished run under a seed, by the arm's name here; None where there is none.

        A note in it says where it was trained.
        """
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
        """The first bench that has the arm calibrated: its folder, its results and the arm's name there."""
        own = _what(arm.record())
        for folder, results in self._benches:
            for other in results["plan"]["arms"] if own is not None else ():
                if _what(other) == own and other["name"] in results["calibration"]:
                    return folder, results, other["name"]
        return None


def _what(arm: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What makes an arm train as it does: its configs without the line that tells where they lie, and its own rates.

    None for an arm that is none of configs, or whose configs are not all of it.
    """
    if arm["kind"] not in ("baseline", "recipe") or not arm["configs"]:
        return None
    return (*(text.partition("\n")[2] for text in arm["configs"]), arm.get("rate"), arm.get("warm_up"))
