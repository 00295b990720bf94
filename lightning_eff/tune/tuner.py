"""The search for a recipe that wins on the user's own module: what it may try is looked at first."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from lightning_eff._errors import UsageError
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Budget, mode_of
from lightning_eff.bench.results import now, write_json
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.tune import probing, profiling
from lightning_eff.tune.config import Recipes, parsed
from lightning_eff.tune.own import discover
from lightning_eff.tune.places import Places
from lightning_eff.tune.space import Space, gather

Tell = Callable[[str], None]
_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(text: str | int | None) -> int | None:
    """``"40GB"``, ``"512MiB"`` or bytes.

    Raises:
        UsageError: for anything else.
    """
    if text is None or isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"Got memory {text!r}; expected an amount above 0 such as 40GB, 512MB or 16GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class Look:
    """What was found before anything is searched.

    Attributes:
        found: the profile of the baseline.
        space: what may be tried, what not, and why.
        recipes: writes what is chosen of it as configs.
    """

    found: profiling.Found
    space: Space
    recipes: Recipes

    def lines(self) -> list[str]:
        """For people."""
        space = self.space
        lines = ["The module", *(f"  {line}" for line in profiling.told(self.found))]
        lines += ["", "The baseline's own settings"]
        lines += [f"  {one.told()}" for one in space.own]
        lines += [f"  {name}: not searched, since {why}" for name, why in space.own_left_out.items()]
        if not self.recipes.scheduled:
            lines.append(
                "  the module's rate does not decay: in every arm a linear decay to zero stands in its place"
                " (LearningRateSchedule), since a rate that is not decayed is a weak baseline"
            )
        lines += ["", f"Tried, at most {space.most} together ({len(space.techniques)})"]
        lines += [f"  {one.told()}" for one in space.techniques.values()] or ["  none"]
        lines += ["", f"Left out ({len(space.left_out)})"]
        return lines + [f"  {name}: {why}" for name, why in sorted(space.left_out.items())]


class Tuner:
    """Which recipe wins on a module and its data, and which techniques could be in it.

    Args:
        baseline: the path(s) of LightningCLI configs, merged from left to right.
        target: the metric that ``validation_step`` logs.
        budget: training seconds of a run, as ``"120s"`` or ``"2m"``. They are counted in reference-system time: each step
            costs the calibrated time of its kind, so that a busy machine and runs side by side do not matter.
        mode: "min" or "max"; None tells by the target's name.
        memory: what a run may use, as ``"40GB"`` or in bytes; None leaves it open.
        space: a file, or a mapping, that says more of the space: ``own``, ``techniques`` and ``most``.
        include: techniques that alone are tried, and class paths of callbacks of one's own.
        exclude: techniques that are not tried.
        out: the folder for all that is found; what was interrupted there goes on.
        jobs: runs at once; 0 for one on each CUDA device, and one on a machine without.
        threads: torch's in each run; 0 shares out those of this process.
        seed: of runs that only look; none that confirms has it.

    Raises:
        ValueError: for other values.
    """

    def __init__(
        self,
        baseline: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        target: str,
        budget: str | float | Budget,
        mode: Literal["min", "max"] | None = None,
        memory: str | int | None = None,
        space: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        out: str | os.PathLike[str] = "lightning_logs/tune",
        jobs: int = 0,
        threads: int = 0,
        seed: int = 0,
    ) -> None:
        paths = (baseline,) if isinstance(baseline, str | os.PathLike) else tuple(baseline)
        self.paths = tuple(map(str, paths))
        for path in self.paths:
            if not Path(path).is_file():
                raise UsageError(
                    f"Got the baseline {path!r}, where there is no file; expected a config of LightningCLI."
                )
        if jobs < 0 or threads < 0:
            raise UsageError(f"Tuner({jobs=}, {threads=}): expected numbers >= 0.")
        self.target = target
        self.mode = mode or mode_of(target)
        self.budget = Budget.parse(budget).seconds
        self.memory = parse_memory(memory)
        self.space = _space_file(space)
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.out = Path(out)
        self.jobs = jobs or torch.cuda.device_count() or 1
        self.threads = threads or max(1, torch.get_num_threads() // self.jobs)
        self.seed = seed

    def look(self, tell: Tell | None = None) -> Look:
        """Profile the baseline, and try each technique that could gain something for two steps.

        What was found in the folder before is not looked for again.

        Args:
            tell: called with a line on what is done.

        Raises:
            ValueError: for a config, a space or a budget that cannot be used, or a target that is not logged.
            RuntimeError: if the baseline does not train.
        """
        self._take_up()
        config = parsed(self.paths)
        found = self._profile(tell or (lambda line: None))
        own, without = discover(config, found)
        space = gather(
            found.run,
            own,
            without,
            file=self.space,
            include=self.include,
            exclude=self.exclude,
            has=found.callbacks,
        )
        recipes = Recipes(self.paths, space, scheduled=found.run.decayed_rate)
        space = probing.after(space, self._probes(recipes, found, tell or (lambda line: None)))
        return Look(found, space, Recipes(self.paths, space, scheduled=found.run.decayed_rate))

    def _profile(self, tell: Tell) -> profiling.Found:
        file = self.out / "profile.json"
        if file.is_file():
            return profiling.Found.of(json.loads(file.read_text()))
        tell("profiling the baseline")
        found = profiling.look(
            Arm("baseline", "baseline", self.paths),
            target=self.target,
            budget=self.budget,
            seed=self.seed,
            threads=self.threads,
            memory=self.memory,
        )
        write_json(file, found.record())
        return found

    def _probes(self, recipes: Recipes, found: profiling.Found, tell: Tell) -> dict[str, str | None]:
        file = self.out / "probes.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        left = [name for name in recipes.space.techniques if name not in known]
        if not left:
            return known
        places = Places(min(self.jobs, len(left)), self.threads, self.out / "logs")

        def done(name: str, why: str | None) -> None:
            known[name] = why
            write_json(file, known)
            tell(
                f"tried for two steps, {len(known)} of {len(recipes.space.techniques)}: {name}{' refused' if why else ''}"
            )

        try:
            return probing.probe(
                recipes,
                places,
                self.out / "configs",
                target=self.target,
                steps=found.steps,
                seed=self.seed,
                threads=self.threads,
                jobs=self.jobs,
                known=known,
                tell=done,
            )
        finally:
            places.close()

    def _plan(self) -> dict[str, Any]:
        return {
            "baseline": [Path(path).read_text() for path in self.paths],
            "target": self.target,
            "mode": self.mode,
            "budget_seconds": self.budget,
            "memory_bytes": self.memory,
            "space": self.space,
            "include": list(self.include),
            "exclude": list(self.exclude),
            "threads": self.threads,
            "seed": self.seed,
        }

    def _take_up(self) -> None:
        """Begin in ``out``, or go on with the same."""
        file = self.out / "plan.json"
        machine = fingerprint(self.threads)
        if not file.is_file():
            self.out.mkdir(parents=True, exist_ok=True)
            if any(self.out.iterdir()):
                raise UsageError(f"{self.out} holds other files; expected an empty folder. Name another one: --out.")
            write_json(file, {"created": now(), "machine": machine, "plan": self._plan()})
        begun = json.loads(file.read_text())
        plan = json.loads(json.dumps(self._plan()))
        differs = [key for key, value in plan.items() if begun["plan"].get(key) != value]
        differs += [key for key in ("cpu", "gpu", "torch", "lightning") if begun["machine"][key] != machine[key]]
        if differs:
            raise UsageError(
                f"{self.out} holds what was found for another plan, which differs in {', '.join(differs)}; expected the same"
                " on the same machine, to go on with it. Name another folder (--out), or delete that one."
            )


def _space_file(space: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if space is None or isinstance(space, Mapping):
        return dict(space or {})
    file = Path(space)
    if not file.is_file():
        raise UsageError(f"--space {space}: there is no such file; expected a space in YAML.")
    try:
        told = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"--space {space}: this is no YAML: {' '.join(str(error).split())}.") from None
    if told is not None and not isinstance(told, dict):
        raise UsageError(
            f"--space {space}: got a {type(told).__name__}; expected the sections own, techniques and most."
        )
    return told or {}
