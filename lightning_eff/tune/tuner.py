"""The search for a recipe that wins on the user's own module: it looks, searches, confirms and writes."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_eff._errors import UsageError
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Budget, mode_of
from lightning_eff.bench.reports import drawing
from lightning_eff.bench.results import now, write_json
from lightning_eff.bench.running.places import Places
from lightning_eff.monitor.energy import EnergyMeter
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.tune import probing, profiling
from lightning_eff.tune.arguments import parse_memory, parse_seconds, read_space
from lightning_eff.tune.concluding import CONFIRMED, Finding
from lightning_eff.tune.config import Recipes, parsed
from lightning_eff.tune.confirm import Bench
from lightning_eff.tune.own import discover
from lightning_eff.tune.search import RUNGS, Search, chosen, require_extra
from lightning_eff.tune.space import Space, gather
from lightning_eff.tune.trials import Trials
from lightning_eff.tune.writing import write

Tell = Callable[[str], None]


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
    """Which recipe wins on a module and its data: :meth:`look` says what may be tried, :meth:`run` tries, confirms and writes.

    Args:
        baseline: the path(s) of LightningCLI configs, merged from left to right.
        target: the metric that ``validation_step`` logs.
        budget: training seconds of a run, as ``"120s"`` or ``"2m"``. They are counted in reference-system time: each step
            costs the calibrated time of its kind, so that a busy machine and runs side by side do not matter.
        search: seconds of it all, as ``"2h"``; None to look only. About half of it or less is kept for confirming.
        mode: "min" or "max"; None tells by the target's name.
        memory: what a run may use, as ``"40GB"`` or in bytes; None leaves it open.
        space: a file, or a mapping, that says more of the space: ``own``, ``techniques`` and ``most``.
        include: techniques that alone are tried, and class paths of callbacks of one's own.
        exclude: techniques that are not tried.
        out: the folder for all that is found; what was interrupted there goes on.
        jobs: runs at once; 0 for one on each CUDA device, and one on a machine without.
        threads: torch's in each run; 0 shares out those of this process.
        seed: of the runs that search; none that confirms has it.
        seeds: on which the best is confirmed: how many.
        price_per_hour: of this machine, in any currency; None tells no money for it.
        price_per_kwh: of its electricity, in that currency.

    Raises:
        ValueError: for other values.
    """

    def __init__(
        self,
        baseline: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        target: str,
        budget: str | float | Budget,
        search: str | float | None = None,
        mode: Literal["min", "max"] | None = None,
        memory: str | int | None = None,
        space: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        out: str | os.PathLike[str] = "lightning_logs/tune",
        jobs: int = 0,
        threads: int = 0,
        seed: int = 0,
        seeds: int = 3,
        price_per_hour: float | None = None,
        price_per_kwh: float | None = None,
    ) -> None:
        paths = (baseline,) if isinstance(baseline, str | os.PathLike) else tuple(baseline)
        self.paths = tuple(map(str, paths))
        for path in self.paths:
            if not Path(path).is_file():
                raise UsageError(
                    f"Got the baseline {path!r}, where there is no file; expected a config of LightningCLI."
                )
        if jobs < 0 or threads < 0 or seeds < 2:
            raise UsageError(f"Tuner({jobs=}, {threads=}, {seeds=}): expected numbers >= 0, and at least 2 seeds.")
        self.target = target
        self.mode = mode or mode_of(target)
        self.budget = Budget.parse(budget).seconds
        self.memory = parse_memory(memory)
        self.space = read_space(space)
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.out = Path(out)
        self.jobs = jobs or torch.cuda.device_count() or 1
        self.threads = threads or max(1, torch.get_num_threads() // self.jobs)
        self.seed = seed
        self.seeds = [seed + 1 + i for i in range(seeds)]
        self.search = None if search is None else parse_seconds(search)
        self.price_per_hour, self.price_per_kwh = price_per_hour, price_per_kwh

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

    def run(self, *, progress: bool = True, tell: Tell | None = None) -> dict[str, Any]:
        """Search, confirm and write; what is in the folder is not done again.

        Args:
            progress: show bars in the benches that confirm.
            tell: called with a line on what is done.

        Returns:
            What was found, as in ``results.json``: ``recipe`` (its choices, or None where the baseline stands), ``baseline``,
            ``sentence``, ``contributions``, ``trials``, ``left_out`` and ``cost``.

        Raises:
            ModuleNotFoundError: without Optuna (the extra ``tune``) or matplotlib (``bench``).
            ValueError: if the search's seconds hold too little, no technique applies, or as :meth:`look` says.
            RuntimeError: if the baseline trains in none of its trials.
        """
        require_extra()
        drawing.require_extra()
        if self.search is None:
            raise UsageError("Got no seconds for the search; expected search='2h', or look() alone.")
        say = tell or (lambda line: None)
        began = time.monotonic()
        with EnergyMeter() as meter:
            look = self.look(say)
            if not look.space.techniques:
                reasons = "; ".join(f"{name}: {why}" for name, why in sorted(look.space.left_out.items())[:6])
                raise UsageError(
                    f"No technique applies to this config, so there is nothing to search ({reasons}; ...). All reasons:"
                    " --dry-run."
                )
            need, reserve = self._needs(look.found)
            if self.search < need:
                raise UsageError(
                    f"Got --search of {self.search:.0f} s; expected at least {math.ceil(need)} s, for one trial of the baseline"
                    f" and one of a recipe on a budget of {self.budget:g} s, and to confirm on {len(self.seeds)} seeds"
                    f" with {self.jobs} run(s) at once. Raise --search, or lower --budget."
                )
            places = Places(self.jobs, self.threads, self.out / "logs")
            try:
                search = self._search(look, places, self.search - min(reserve, self.search / 2), say)
            finally:
                places.close()
            found = Finding(look, search, self._bench(look, search, progress)).conclude(say)
        cost = self._cost(time.monotonic() - began, meter.joules)
        return write(self.out, look, search, found, cost, mode=self.mode, target=self.target, budget=self.budget)

    def _needs(self, found: profiling.Found) -> tuple[float, float]:
        """The least seconds that a search can be done in, and what is kept for confirming."""
        run = self.budget + found.start_seconds + 2 * found.validation_seconds
        trial = sum(run * rung / RUNGS[-1] for rung in RUNGS)
        once = run * len(self.seeds) / self.jobs
        return 2 * trial / min(self.jobs, 2) + 2 * once, (2 + 2 * CONFIRMED + 4) * once

    def _search(self, look: Look, places: Places, seconds: float, tell: Tell) -> Search:
        assert self.search is not None
        trials = Trials(
            look.recipes,
            look.found,
            places,
            self.out,
            target=self.target,
            budget=self.budget,
            seed=self.seed,
            threads=self.threads,
            memory=self.memory,
        )
        search = Search(
            look.space,
            trials,
            self.out,
            mode=self.mode,
            budget=self.budget,
            seconds=seconds,
            seed=self.seed,
            jobs=self.jobs,
            tell=tell,
        )
        try:
            search.search()
        except BaseException:
            places.close()
            raise
        return search

    def _bench(self, look: Look, search: Search, progress: bool) -> Bench:
        best = search.best("baseline")
        assert best is not None
        return Bench(
            look.recipes,
            chosen(best),
            look.found.steps,
            self.out,
            target=self.target,
            mode=self.mode,
            budget=self.budget,
            seeds=self.seeds,
            threads=self.threads,
            jobs=self.jobs,
            progress=progress,
            drawn=True,
        )

    def _cost(self, seconds: float, joules: float | None) -> dict[str, Any]:
        """Hours and energy over all times that the search was gone on with, and their price."""
        file = self.out / "cost.json"
        before = json.loads(file.read_text()) if file.is_file() else {"hours": 0.0, "kwh": None}
        hours = before["hours"] + seconds / 3600
        kwh = before["kwh"] if joules is None else (before["kwh"] or 0.0) + joules / 3.6e6
        parts = [
            price * amount
            for price, amount in ((self.price_per_hour, hours), (self.price_per_kwh, kwh))
            if price is not None and amount is not None
        ]
        cost = {"hours": hours, "kwh": kwh, "money": sum(parts) if parts else None}
        write_json(file, cost)
        return cost

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
            "seeds": self.seeds,
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
