"""The search for a recipe that beats the baseline on the user's module."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from lightning_eff._cli.errors import UsageError
from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Budget, mode_of
from lightning_eff.bench.reports import drawing
from lightning_eff.bench.results import write_json
from lightning_eff.bench.running import ray_places
from lightning_eff.bench.running.places import Places
from lightning_eff.monitor._cost import Price, Prices
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.tune.arguments import as_tuple, at_once, in_memory, parse_memory, parse_seconds, read_space
from lightning_eff.tune.concluding import Finding
from lightning_eff.tune.config import Choices, Recipes, check_own, digests, parsed
from lightning_eff.tune.confirm import Bench
from lightning_eff.tune.inspection import probing, profiling, resuming
from lightning_eff.tune.inspection.looking import Look
from lightning_eff.tune.own import discover
from lightning_eff.tune.reports.cost import Ledger
from lightning_eff.tune.reports.writing import write
from lightning_eff.tune.search import RUNGS, Search, chosen, require_extra
from lightning_eff.tune.space import NOT_INCLUDED, check, gather
from lightning_eff.tune.timing import Durations, Timetable
from lightning_eff.tune.trials import Trials

Tell = Callable[[str], None]
SHARES = [rung / RUNGS[-1] for rung in RUNGS]  # fractions of the budget at which a trial runs
PROBING = 0.2  # of the time that is left, in which each technique is tried alone


class Tuner:
    """Search for a recipe that beats the baseline on your module and data, and confirm it on new seeds.

    :meth:`look` profiles the baseline and lists the techniques that may help. :meth:`run` searches them, confirms the best
    recipe in a bench against the baseline, and writes ``recipe.yaml`` and a report. It says so if the baseline wins. An
    interrupted search continues from its folder.

    Args:
        baseline: the path(s) of LightningCLI configs, merged from left to right.
        target: the metric that ``validation_step`` logs.
        budget: the training time of a run, as ``"120s"``, in reference-system time: a step counts with its calibrated cost.
        search: the time of the whole search with the confirmation, as ``"2h"``. The search says at its start how many trials
            fit, and refuses a time in which it cannot confirm one recipe. None only looks.
        mode: the direction of a better metric. None finds it from the target's name.
        memory: the memory that a run may use, as ``"40GB"`` or in bytes. None sets no limit.
        space: a file or a mapping that refines the search space: ``own``, ``techniques`` and ``most``.
        include: the only techniques to try, with class paths for your own callbacks.
        exclude: the techniques not to try.
        out: the folder for all results.
        jobs: the number of parallel runs. 0 is one per CUDA device. On a CPU it is as many runs of ``threads`` cores as the
            machine has cores and memory for, and at most four if ``threads`` is 0.
        threads: the number of torch threads per run. 0 divides those of this process.
        seed: the seed of the searching runs. The confirming runs use other seeds.
        seeds: the number of seeds that confirm the best recipe.
        price_per_hour: the price of this machine, or of each worker of a Ray cluster, per hour. None reports no cost of it.
        price_per_kwh: the price of a kWh of its electricity, in the same currency.
        engine: the place of trials: processes on this machine, or ``jobs`` workers of a Ray cluster (0 uses as many as fit).
            This machine always makes the profile and confirms the result, so it should be like the workers.

    Raises:
        ModuleNotFoundError: for the engine "ray", without the extra ``ray``.
        ValueError: for a value out of range, or a baseline that is not a file.

    Example:
        >>> open("baseline.yaml", "w").close()  # your own config
        >>> tuner = Tuner("baseline.yaml", target="val_loss", budget="120s", search="2h")
    """

    @declared
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
        jobs: Annotated[int, Count(at_least=0)] = 0,
        threads: Annotated[int, Count(at_least=0)] = 0,
        seed: int = 0,
        seeds: Annotated[int, Count(at_least=2)] = 3,
        price_per_hour: Price | None = None,
        price_per_kwh: Price | None = None,
        engine: Literal["local", "ray"] = "local",
    ) -> None:
        self.paths = tuple(map(str, as_tuple(baseline)))
        for path in self.paths:
            if not Path(path).is_file():
                raise UsageError(f"Got the baseline {path!r}, which is not a file. Give a LightningCLI config.")
        self.target = target
        self.mode = mode or mode_of(target)
        self.budget = Budget.parse(budget).seconds
        self.memory = parse_memory(memory)
        self.space = read_space(space)
        self.include, self.exclude = as_tuple(include), as_tuple(exclude)
        self.out = Path(out)
        self.engine = engine
        here = torch.cuda.device_count() or at_once(threads)
        self._fitted = engine == "local" and not jobs and not torch.cuda.device_count()
        if engine == "ray":
            ray_places.require_extra()
            jobs = jobs or ray_places.capacity(threads or torch.get_num_threads())
        self.jobs = jobs or here
        self.threads = threads or max(
            1, torch.get_num_threads() // min(self.jobs, here if engine == "ray" else self.jobs)
        )
        self._machines = self.jobs if engine == "ray" else 1  # each worker has the price of an hour
        self._bench_jobs = min(self.jobs, here) if engine == "ray" else self.jobs
        self.seed = seed
        self.seeds = [seed + 1 + i for i in range(seeds)]
        self.search = None if search is None else parse_seconds(search)
        self.price_per_hour, self.price_per_kwh = price_per_hour, price_per_kwh

    def look(self, tell: Tell | None = None) -> Look:
        """Profile the baseline, and try each technique that could help for two steps.

        Results that are already in the folder are reused.

        Args:
            tell: a function that is called with a line about each stage.

        Raises:
            ValueError: for a config, space or budget that cannot be used, or a target that is not logged.
            RuntimeError: if the baseline does not train.
        """
        return self._look(tell or (lambda line: None), Timetable(None, SHARES))

    def _look(self, say: Tell, time: Timetable) -> Look:
        check(self.space, include=self.include, exclude=self.exclude)
        resuming.start_or_resume(self.out, self._plan(), fingerprint(self.threads))
        config = parsed(self.paths)
        check_own(self.paths, self.space.get("own"))
        code = digests(config, self.include)
        resuming.check_code(self.out, code)
        found = self._profile(say)
        resuming.save_code(self.out, code)
        if self._fitted:
            self.jobs = self._bench_jobs = min(self.jobs, in_memory(found.peak_bytes))
        if not self._begun:
            time.check(self._durations(found))
        run = found.run
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
        if time.search is not None:
            profiling.check_rate(found, shortened=any(one.name == "warm_up" for one in space.own))
        recipes = Recipes(self.paths, space, scheduled=run.decayed_rate or run.manual_optimization)
        named = {*self.include, *(self.space.get("techniques") or {})}
        space = probing.after(space, self._probes(recipes, found, say, time), named)
        return Look(found, space, Recipes(self.paths, space, scheduled=run.decayed_rate or run.manual_optimization))

    def run(self, *, progress: bool = True, tell: Tell | None = None) -> dict[str, Any]:
        """Search, confirm the best recipe, and write the results. Results that are already in the folder are reused.

        Args:
            progress: whether to show progress bars in the confirming benches.
            tell: a function that is called with a line about each stage.

        Returns:
            The results, as in ``results.json``: ``recipe`` (its choices, or None if the baseline won), ``baseline``,
            ``sentence``, ``contributions``, ``trials``, ``left_out`` and ``cost``.

        Raises:
            ModuleNotFoundError: without Optuna (the extra ``tune``) or matplotlib (``bench``).
            ValueError: if nothing can be confirmed in the search time or no technique applies, and as in :meth:`look`.
            RuntimeError: if the baseline trains in none of its trials.
        """
        require_extra()
        drawing.require_extra()
        if self.search is None:
            raise UsageError(
                "Tuner(search=None): there is no time to search. Set search='2h', or call look() instead of run()."
            )
        prices = Prices(self.price_per_hour, self.price_per_kwh)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with Ledger(self.out, prices, machines=self._machines, device=device) as ledger:
            time = Timetable(self.search, SHARES, before=ledger.before if self._begun else 0.0)

            def say(line: str) -> None:
                ledger.keep()
                if tell is not None:
                    tell(line)

            look = self._look(say, time)
            if not look.space.techniques:
                asked = sorted(look.space.left_out.items(), key=lambda one: (one[1] == NOT_INCLUDED, one))
                reasons = "; ".join(f"{name}: {why}" for name, why in asked[:6])
                raise UsageError(
                    f"No technique applies to this config, so there is nothing to search ({reasons}; ...). All reasons:"
                    " --dry-run."
                )
            durations = self._durations(look.found)
            seconds = self._seconds(durations, time)
            rest = max(seconds - self._searched(), 0.0)
            aim = "less" if self.mode == "min" else "more"
            say(f"plan, for {aim} {self.target}: {time.describe(durations, rest, again=self._begun)}")
            places = self._places(self.jobs)
            try:
                search = self._search(look, places, seconds, say)
            finally:
                places.close()
            bench = self._bench(look, search, progress)
            found = Finding(look, search, bench, durations.bench, lambda: time.left).conclude(say)
            settings = {"mode": self.mode, "target": self.target, "budget": self.budget, "memory": self.memory}
            return write(self.out, look, search, found, ledger.keep(), **settings)

    def _places(self, count: int) -> Any:
        kind = Places if self.engine == "local" else ray_places.RayPlaces
        return kind(count, self.threads, self.out / "logs")

    def _durations(self, found: profiling.Found) -> Durations:
        file = self.out / "start.json"
        process = json.loads(file.read_text())["process_seconds"] if file.is_file() else 0.0
        return found.durations(self.budget, process, len(self.seeds), self._bench_jobs)

    def _seconds(self, durations: Durations, time: Timetable) -> float:
        """Return the seconds for trials, earlier ones included. It stays the same when a search of this length continues."""
        file = self.out / "search.json"
        saved = json.loads(file.read_text()) if file.is_file() else None
        if saved is not None and saved["search"] == self.search:
            return saved["seconds"]
        seconds = self._searched() + max(time.left - time.kept(durations), 0.0)
        write_json(file, {"search": self.search, "seconds": seconds})
        return seconds

    def _searched(self) -> float:
        """Return the seconds that trials have taken so far."""
        file = self.out / "clock.json"
        return json.loads(file.read_text())["seconds"] if file.is_file() else 0.0

    @property
    def _begun(self) -> bool:
        """Whether trials have begun."""
        return resuming.begun(self.out)

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
        trials.left = lambda: seconds - search.spent
        try:
            search.search()
        except BaseException:
            places.close()
            raise
        return search

    def _bench(self, look: Look, search: Search, progress: bool) -> Bench:
        best, trials = search.best("baseline"), search.run
        assert best is not None and isinstance(trials, Trials)

        def steps(choices: Choices) -> int:
            """Return the steps in the budget. Choices without a trial rehearse first if their config needs the steps."""
            if not look.recipes.counts_steps(choices):
                return look.found.steps
            if trials.rehearsed(choices):
                return trials.steps(choices)
            trials.places = self._places(1)
            try:
                return trials.steps(choices)
            finally:
                trials.places.close()

        return Bench(
            look.recipes,
            chosen(best),
            steps,
            self.out,
            baseline_steps=trials.steps(chosen(best)),
            target=self.target,
            mode=self.mode,
            budget=self.budget,
            seeds=self.seeds,
            threads=self.threads,
            jobs=self._bench_jobs,
            memory=self.memory,
            progress=progress,
            drawn=True,
        )

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

    def _probes(self, recipes: Recipes, found: profiling.Found, tell: Tell, time: Timetable) -> dict[str, str | None]:
        file = self.out / "probes.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        left = [name for name in recipes.space.techniques if name not in known]
        if not left or self._begun:  # the space must not change once there are trials
            return known
        places = self._places(min(self.jobs, len(left)))
        until = math.inf

        def done(name: str, why: str | None) -> None:
            known[name] = why
            write_json(file, known)
            tell(
                f"two steps of {name} ({len(known)} of {len(recipes.space.techniques)}): {'left out' if why else 'ok'}"
            )

        try:
            began = time.spent
            places.start()
            write_json(self.out / "start.json", {"process_seconds": time.spent - began})
            durations = self._durations(found)
            time.check(durations)
            if time.search is not None:
                until = time.spent + min(PROBING * time.left, max(time.left - durations.least(SHARES), 0.0))
            return probing.probe(
                recipes.space,
                lambda name: probing.refused(
                    recipes,
                    name,
                    places,
                    self.out / "configs",
                    target=self.target,
                    steps=found.steps,
                    seed=self.seed,
                    threads=self.threads,
                    limit=durations.probe_limit,
                ),
                jobs=self.jobs,
                known=known,
                tell=done,
                over=lambda: time.spent >= until,
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
