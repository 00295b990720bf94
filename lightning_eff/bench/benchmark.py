"""Compare recipes with their baseline, with the protocol of Kaddour et al. 2023 (arXiv:2307.06440)."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.loggers import Logger

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Each, Either, Function, Integer, Names, Number, Text
from lightning_eff._core._arguments.objects import FilePath, Instance, Table
from lightning_eff.bench import several
from lightning_eff.bench.arms import Arm, lay_out, short
from lightning_eff.bench.known import Known
from lightning_eff.bench.pace import Budget, Incomparable, Pace, mode_of, warm_up_share
from lightning_eff.bench.progress import PlanBar
from lightning_eff.bench.references import References
from lightning_eff.bench.rehearsing import Rehearsing
from lightning_eff.bench.reports.export import log
from lightning_eff.bench.reports.report import require_extra, write
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.reports.words import plan_line
from lightning_eff.bench.results import SCHEMA, now, save, write_json
from lightning_eff.bench.running import dry_run
from lightning_eff.bench.running.jobs import Job, crashed
from lightning_eff.bench.running.workers import InProcess, Place, Workers
from lightning_eff.monitor.machine import fingerprint

Build = Callable[[], Any]
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Build
_SOURCE = Either(FilePath("the path of a config"), Each(FilePath()), Function("() that returns a Trainer and a module"))
_WARM_UP = Either(Text(), Number(at_least=0))


class Benchmark:
    """Compare recipes with a baseline at equal training time, for any module and data.

    Every arm trains for the same number of training seconds, with a learning rate schedule that fits this budget. For each
    seed all arms see the same data in the same order, and they take turns (A B C A B C). Each arm rehearses first: a few
    steps through the whole schedule measure the cost of each kind of step and check that the arms can be compared. The
    report gives the difference from the baseline, with a confidence interval over seeds.

    Use it to decide whether a recipe pays. It costs the budget times the number of arms times the number of seeds, plus the
    rehearsals. Functions run in this process, and configs run in their own processes. An interrupted bench continues from
    its folder.

    Args:
        baseline: a function that returns a new ``(Trainer, module)`` or ``(Trainer, module, datamodule)`` per call, or the
            path(s) of LightningCLI configs, merged from left to right. The bench replaces the Trainer's limits, logger,
            checkpoints, progress bar, early stopping and validation interval.
        recipes: the same for each recipe, by name.
        target: the metric that ``validation_step`` logs.
        budget: the training time of a run, as in :meth:`Budget.parse`. A list, or a text with commas, runs a bench at each.
        seeds: the number of seeds (1, 2, ...), or a list of them.
        out: the folder for results.
        mode: the direction of a better metric. None finds it from the target's name.
        controls: the control arms. "auto" adds the controls that each technique of a recipe names. None adds none.
        ladder: further budgets of the baseline, as factors of the budget. They express gains in baseline seconds.
        threads: the number of torch threads per arm. 0 uses as many as this process has.
        jobs: the number of parallel runs, for configs and reference-system time only.
        evaluations: the number of validations per run, evenly spaced, the last one at the end of the budget.
        schedule: the learning rate schedule. "own" stretches the module's over the budget. "linear" and "cosine" replace it
            in every arm and decay to zero.
        rounds: the number of rehearsals per arm.
        reference: a file with the step costs of this baseline on this machine. The first bench writes it, and later benches
            read it, so that a reference second is the same number of steps in all. The results of another bench (a folder
            or file) make its costs count instead.
        known: folders of finished benches with the same code, baseline, settings and machine. Their runs are reused for arms
            with the same configs. Needs ``reference`` and configs.
        other_training_data: whether arms may train on other data than the baseline, if that is what you compare.
        rates: the peak learning rate of an arm that needs its own, by name. A recipe's controls use it too.
        warm_ups: the warm-up of an arm that needs its own, in seconds ("5s") or as a fraction of the budget ("5%", 0.05).
        tuned: the names of arms whose settings were tuned for this budget, for the report.
        logger: a Lightning logger for the curves and figures.
        title: the title of the report.
        baseline_name: the name of the baseline in tables.

    Raises:
        ValueError: for a value out of range, arguments that contradict each other, or arms that cannot be compared.

    Example:
        >>> def run(*callbacks):  # with your own module
        ...     return L.Trainer(max_epochs=10, callbacks=list(callbacks)), L.LightningModule()
        >>> recipes = {"smoothing": lambda: run(LabelSmoothing(0.1))}
        >>> bench = Benchmark(run, recipes, target="val_loss", budget="120s", seeds=3)

    References:
        Kaddour et al. 2023, "No Train No Gain", arXiv:2307.06440.
    """

    @declared
    def __init__(
        self,
        baseline: Annotated[Source, _SOURCE],
        recipes: Annotated[Mapping[str, Source], Table("names", _SOURCE)],
        *,
        target: Annotated[str, Text("the name of a logged metric")],
        budget: str | float | Budget | Sequence[str | float | Budget],
        seeds: Annotated[int | Sequence[int], Either(Count(), Each(Integer(), distinct=True))] = 3,
        out: Annotated[str | os.PathLike[str], FilePath()] = "lightning_logs/bench",
        mode: Literal["min", "max"] | None = None,
        controls: Literal["auto"] | None = None,
        ladder: Annotated[Sequence[float], Each(Number(above=0), empty=True)] = (),
        threads: Annotated[int, Count(at_least=0)] = 0,
        jobs: Annotated[int, Count()] = 1,
        evaluations: Annotated[int, Count(at_least=2)] = 10,
        schedule: Literal["own", "linear", "cosine"] = "own",
        rounds: Annotated[int, Count(at_least=2)] = 8,
        reference: Annotated[str | os.PathLike[str], FilePath()] | None = None,
        known: Annotated[Sequence[str | os.PathLike[str]], Each(FilePath(), empty=True)] = (),
        other_training_data: bool = False,
        rates: Annotated[Mapping[str, float], Table("names of arms", Number(above=0))] | None = None,
        warm_ups: Annotated[Mapping[str, str | float], Table("names of arms", _WARM_UP)] | None = None,
        tuned: Annotated[Sequence[str], Names("names of arms")] | None = None,
        logger: Annotated[Logger, Instance("a Lightning logger", (Logger,))] | None = None,
        title: Annotated[str, Text()] | None = None,
        baseline_name: Annotated[str, Text()] = "baseline",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "budget", "out")}
        self._arguments = arguments
        self.budgets = several.parse(budget)
        self.budget = self.budgets[0]
        self.seeds = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
        if 1 in ladder:
            raise ValueError(f"Benchmark(ladder={list(ladder)}): a factor of 1 is the baseline itself. Leave it out.")
        if not recipes and not ladder:
            raise ValueError(
                "Benchmark(recipes={}): there is nothing to compare with the baseline. Give at least one recipe, or a ladder"
                " to run the baseline alone at several budgets."
            )
        self.target = target
        self.mode = mode or mode_of(target)
        self.out = Path(out)
        self.threads = threads or torch.get_num_threads()  # the same for every arm, in whichever process
        self.evaluations = evaluations
        self.schedule = schedule
        self.rounds = rounds
        self.other_training_data = other_training_data
        self.title = title or (f"{', '.join(recipes)} against {baseline_name}" if recipes else baseline_name)
        self.reference = None if reference is None else References(reference)
        for name, text in (warm_ups or {}).items():
            warm_up_share(text, self.budget.seconds * (min([1.0, *ladder]) if name == baseline_name else 1.0))
        if strangers := sorted(set(tuned or ()) - {baseline_name, *recipes}):
            raise ValueError(
                f"Benchmark(tuned={strangers}): there are no such arms. Use names from {[baseline_name, *recipes]}."
            )
        self.tuned = None if tuned is None else list(tuned)
        self.logger = logger
        self.arms = lay_out(
            (baseline_name, baseline),
            recipes,
            controls=controls == "auto",
            ladder=ladder,
            rates=rates,
            warm_ups=warm_ups,
        )
        in_process = any(callable(arm.source) for arm in self.arms)
        if jobs > 1 and (in_process or self.budget.clock == "wall"):
            in_one = "functions run in this process; use configs for parallel runs"
            why = "parallel runs slow each other, and the budget is wall-clock time; use reference-system time: budget='120rs'"
            raise ValueError(f"Benchmark({jobs=}): expected 1, because {in_one if in_process else why}.")
        if self.reference is not None and self.budget.clock == "wall":
            raise ValueError(
                "Benchmark(reference=...): the budget is wall-clock time. Use reference-system time: budget='120rs'."
            )
        if known and (in_process or self.reference is None or len(self.budgets) > 1):
            raise ValueError(
                f"Benchmark(known={[str(folder) for folder in known]}): earlier runs can be reused only for configs with one"
                " budget in reference-system time. Give such a budget and reference=, or leave known out."
            )
        self.jobs = jobs
        self._known_folders = list(known)
        self._in_process = in_process
        self._calibration: dict[str, Any] = {}

    # -- the whole

    def run(self, *, progress: bool = True, report: bool = True) -> dict[str, Any]:
        """Run what is left of the bench, write ``results.json`` and CSV files to ``out``, and return the results.

        With several budgets, each has its own folder in ``out``, and the results are returned by the budget's name, such as
        "60rs". In reference-system time all budgets use the same step costs.

        Args:
            progress: whether to show a bar with the time left.
            report: whether to write ``report.html`` and the figures. Needs matplotlib (the extra ``bench``).

        Raises:
            ModuleNotFoundError: before anything runs, if ``report`` is set and matplotlib is not installed.
            ValueError: if the arms cannot be compared (:class:`Incomparable`), or ``out`` holds another bench.
            RuntimeError: if the baseline crashes or diverges in its rehearsal.
        """
        if report:
            require_extra()
        self.out.mkdir(parents=True, exist_ok=True)
        if len(self.budgets) > 1:
            every = several.run(self._at, self.budgets, self.out, progress=progress, report=report)
            if self.logger is not None:
                log(every, self.logger)
            return every
        self._begin_or_continue()
        taken = self._reuse_known()
        workers: Place = InProcess() if self._in_process else Workers(self.jobs, self.threads, self.out / "logs")
        runs = [(seed, arm) for seed in self.seeds for arm in self.arms]
        total = sum(arm.factor for _, arm in runs) * self.budget.seconds
        rehearsed = [
            arm for arm in self.arms if arm.kind != "ladder" and (arm.kind == "baseline" or arm.name not in taken)
        ]
        bar = PlanBar(total, self.budget.seconds, 1 + len(rehearsed) * (1 + self.rounds), enabled=progress)
        try:
            self._calibrate(workers, bar, taken)
            self._run_all(workers, bar, runs)
        finally:
            bar.close()
            workers.close()
        results = self._results(finished=True)
        write(results, self.out, drawn=report)
        if self.logger is not None:
            log({"": results}, self.logger)
        return results

    def dry_run(self, width: int = 100) -> tuple[str, bool]:
        """Check every arm with a few steps, without a run. Nothing is written.

        Args:
            width: the width of the text in characters; 80 to 160 are used.

        Returns:
            A text with the checks and the estimated time, and whether the bench can run.

        Raises:
            ValueError: if the baseline cannot be measured (:class:`Incomparable`).
            RuntimeError: if the baseline crashes or diverges.
        """
        arms = [arm for arm in self.arms if arm.kind != "ladder"]
        found = dry_run.Checks(self._pace, self.budget, self.seeds[0], self.threads, self.other_training_data).of(arms)
        counts = {"seeds": len(self.seeds), "rounds": self.rounds, "jobs": self.jobs, "evaluations": self.evaluations}
        seconds = sum(dry_run.estimate(found, self.arms, budget.seconds, **counts) for budget in self.budgets)
        text = dry_run.text(found, seconds, plan_line({"plan": self._plan()}), width)
        return text, all(one.status != "refused" for one in found)

    def _at(self, budget: Budget, out: Path, prices: Path | None) -> "Benchmark":
        """Return the same bench at another budget."""
        own = {"reference": self._arguments["reference"] or prices, "logger": None}  # all budgets are logged as one
        return Benchmark(**{**self._arguments, **own}, budget=budget, out=out)

    def _do(self, workers: Place, bar: PlanBar, jobs: list[Job], folder: str, stage: str) -> list[dict[str, Any]]:
        """Return the records of the jobs in order. Those on disk are read, and the others are run."""
        place = self.out / folder
        place.mkdir(exist_ok=True)
        records: dict[str, dict[str, Any]] = {}
        for job in jobs:
            file = place / f"{job.name}.json"
            if file.is_file():
                records[job.name] = json.loads(file.read_text())
                bar.skip(job)
        left = [job for job in jobs if job.name not in records]
        bar.stage(stage, left)
        done = workers.each(left, bar.update) if folder == "runs" else workers.together(left, bar.update)
        for job, record in done if left else ():
            if record["status"] == "refused":
                raise Incomparable(f"{job.arm.name}: {record['error']}")
            bar.done(job, record)
            write_json(place / f"{job.name}.json", record)
            records[job.name] = record
            if folder == "runs":
                save(self._results(finished=False), self.out)
        return [records[job.name] for job in jobs]

    # -- rehearsals

    def _reuse_known(self) -> dict[str, Any]:
        """Copy the runs of arms that earlier benches contain, and return the calibrations of these arms.

        This happens when the bench starts. An arm that has already rehearsed here keeps its step costs.
        """
        file = self.out / "known.json"
        if file.is_file():
            return json.loads(file.read_text())
        if not self._known_folders or self.reference is None or (self.out / "rehearsals").exists():
            return {}
        known = Known(self._known_folders, self._plan(), self._machine, self.arms[0], self.reference)
        taken = known.calibrations(self.arms)
        write_json(file, taken)
        (self.out / "runs").mkdir(exist_ok=True)
        for arm, seed in ((arm, seed) for arm in self.arms if arm.name in taken for seed in self.seeds):
            if (record := known.run(arm, seed)) is not None:
                name = f"{self._slug(arm)}-seed{seed}"
                write_json(self.out / "runs" / f"{name}.json", {**record, "name": name})
        return taken

    def _calibrate(self, workers: Place, bar: PlanBar, taken: Mapping[str, Any]) -> None:
        def rehearse(
            arms: list[Arm], what: str, sweep: int, steps: Mapping[str, int], inspect: bool
        ) -> list[dict[str, Any]]:
            jobs = []
            for arm in arms:
                more = {"inspect": inspect, "check_target": what == "first"}
                pace = self._pace(arm, steps=steps[arm.name], sweep=sweep, **more)
                jobs.append(Job(arm, self.seeds[0], pace, f"{self._slug(arm)}-{what}", self.threads))
            return self._do(workers, bar, jobs, "rehearsals", f"rehearsal, {what}")

        baseline, *others = (arm for arm in self.arms if arm.kind != "ladder")
        rehearsing = Rehearsing(
            rehearse, self.budget.seconds, self.rounds, self.reference, self._machine, self.other_training_data
        )
        found = {**rehearsing.calibrated(baseline, [arm for arm in others if arm.name not in taken]), **taken}
        self._calibration = {arm.name: found[arm.name] for arm in (baseline, *others)}

    # -- runs

    def _run_all(self, workers: Place, bar: PlanBar, runs: list[tuple[int, Arm]]) -> None:
        jobs = []
        for seed, arm in runs:
            calibrated = self._calibration[self.arms[0].name if arm.kind == "ladder" else arm.name]
            failed = calibrated.get("failed")
            pace = self._pace(
                arm,
                budget=self.budget.seconds * arm.factor,
                reference=self.budget.clock == "reference",
                prices={price["kind"]: price["seconds"] for price in calibrated.get("prices", ())},
                common=[price["kind"] for price in self._calibration[self.arms[0].name]["prices"]],
                steps=max(1, round(calibrated.get("steps", 1) * arm.factor)),
                evaluations=self.evaluations,
            )
            job = Job(arm, seed, pace, f"{self._slug(arm)}-seed{seed}", self.threads)
            file = self.out / "runs" / f"{job.name}.json"
            if failed is not None and not file.is_file():
                record = {**crashed(job, f"in its rehearsal: {failed['error']}"), "status": failed["status"]}
                file.parent.mkdir(exist_ok=True)
                write_json(file, record)
            jobs.append(job)
        self._do(workers, bar, jobs, "runs", "runs")

    def _pace(self, arm: Arm, **more: Any) -> Pace:
        """Return an arm's pace with its learning rate schedule."""
        seconds = self.budget.seconds * arm.factor
        warm_up = None if arm.warm_up is None else warm_up_share(arm.warm_up, seconds)
        return Pace(self.target, schedule=self.schedule, rate=arm.rate, warm_up=warm_up, **more)

    def _slug(self, arm: Arm) -> str:
        return f"{self.arms.index(arm):02d}-{re.sub(r'[^A-Za-z0-9]+', '-', arm.name).strip('-')[:60]}"

    # -- the record

    def _plan(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "mode": self.mode,
            "budget": {"seconds": self.budget.seconds, "clock": self.budget.clock},
            "seeds": self.seeds,
            "threads": self.threads,
            "evaluations": self.evaluations,
            "schedule": self.schedule,
            "rounds": self.rounds,
            "tuned": self.tuned,
            "reference": None if self.reference is None else short(self.reference.path),
            "arms": [{**arm.record(), "configs": arm.texts()} for arm in self.arms],
        }

    def _begin_or_continue(self) -> None:
        """Begin a bench in ``out``, or continue the same bench there."""
        file = self.out / "plan.json"
        machine = fingerprint(self.threads)
        if not file.is_file():
            if any((self.out / name).exists() for name in ("runs", "results.json")):
                raise ValueError(
                    f"Benchmark(out={str(self.out)!r}): the folder has other results. Set --out to an empty folder."
                )
            write_json(file, {"created": now(), "machine": machine, "plan": self._plan()})
        begun = json.loads(file.read_text())
        plans = [_without_descriptions(plan) for plan in (begun["plan"], self._plan())]
        differs = [key for key, value in plans[1].items() if plans[0].get(key) != value]
        differs += [key for key in ("cpu", "gpu", "torch", "lightning") if begun["machine"][key] != machine[key]]
        if differs:
            raise ValueError(
                f"Benchmark(out={str(self.out)!r}): the folder has a bench that differs in {', '.join(differs)}, so this one"
                " cannot continue it. Set --out to another folder, or delete this one."
            )
        self._created, self._machine = begun["created"], begun["machine"]

    def _results(self, *, finished: bool) -> dict[str, Any]:
        results: dict[str, Any] = {
            "schema": SCHEMA,
            "title": self.title,
            "created": self._created,
            "finished": now() if finished else None,
            "machine": self._machine,
            "plan": self._plan(),
            "calibration": {name: c for name, c in self._calibration.items() if "failed" not in c},
            "runs": [],
        }
        for seed in self.seeds:
            for arm in self.arms:
                file = self.out / "runs" / f"{self._slug(arm)}-seed{seed}.json"
                if file.is_file():
                    results["runs"].append(json.loads(file.read_text()))
        results["summary"] = summarize(results)
        return results


def _without_descriptions(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan without the arms' descriptions, whose wording may change."""
    arms = [{name: value for name, value in arm.items() if name != "description"} for arm in plan["arms"]]
    return {**plan, "arms": arms}
