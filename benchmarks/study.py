"""Small studies of many recipes on small tasks, by processor time: tuned, rehearsed in turns, trained, told in a page.

``selection.py`` and ``augmentation.py`` say which recipes and tasks. A study tunes the baseline's learning rate on a seed that
no evaluation uses, tells by rehearsals in turns how many steps of each arm the budget holds, and trains the baseline, every
recipe and every control, seed by seed. All is one process of one torch thread. After a kill the same command goes on where it
was: the results are written after each piece.

Seconds are the processor time of this process in training steps, the first among them, without validation: what a step
takes on a core of its own, but for caches. What others do to these is taken out by plain steps just before and after each
run: its seconds are divided by how much longer a plain step took then than in the rehearsals.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tune  # noqa: E402
from lightning_eff.bench.reports.intervals import Interval, paired_interval  # noqa: E402
from lightning_eff.bench.reports.statistics import speed_up, time_to  # noqa: E402

BASELINE = "baseline"
REHEARSED, WARM, EVALUATIONS = 24, 8, 8


@dataclass(frozen=True)
class Subject:
    """What is studied.

    Attributes:
        name: of the script, of its results and of its page.
        title: of the page.
        words: its first paragraph.
        folder: with a config for each task, ``<task>.yaml``, and ``recipes/<arm>.yaml``.
        tasks: titles by name.
        arms: names of recipes and controls, without the baseline.
        controls: which arm stands beside a recipe; the baseline beside those that are not named.
        home: where the page is written, and beside it in ``results`` the results.
        budgets: processor seconds of a run, by task.
        rates: learning rates that the baseline is tuned over, by task.
    """

    name: str
    title: str
    words: str
    folder: Path
    tasks: Mapping[str, str]
    arms: Sequence[str]
    budgets: Mapping[str, float]
    rates: Mapping[str, Sequence[str]]
    controls: Mapping[str, str] = field(default_factory=dict)
    home: Path = ROOT / "benchmarks"

    @property
    def results(self) -> Path:
        return self.home / "results" / f"{self.name}.json"

    @property
    def page(self) -> Path:
        return self.home / f"{self.name}.md"


def config_of(folder: Path, task: str, arm: str, rate: float | None = None) -> dict[str, Any]:
    """The whole config of an arm."""
    config = yaml.safe_load((folder / f"{task}.yaml").read_text())
    if arm != BASELINE:
        config = tune.merged(config, yaml.safe_load((folder / "recipes" / f"{arm}.yaml").read_text()))
    return config if rate is None else tune.merged(config, {"model": {"init_args": {"lr": rate}}})


def fit(config: dict[str, Any], seed: int, steps: int, evaluations: int) -> dict[str, Any]:
    """Train for so many steps.

    Returns:
        ``steps``, processor ``seconds`` of each; and ``points``: after how many steps, with the metrics of validation.
    """
    from lightning.pytorch import Callback

    class Clock(Callback):
        """The last of the callbacks: its seconds of a step are from the end of one batch, or of validation, to the next's."""

        def __init__(self) -> None:
            self.began = 0.0
            self.steps: list[float] = []
            self.points: list[dict[str, Any]] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.began = time.process_time()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            now = time.process_time()
            self.steps.append(now - self.began)
            self.began = time.process_time()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            found = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val_")}
            self.points.append({"steps": len(self.steps), **found})
            self.began = time.process_time()

    clock = Clock()
    cli = tune.built(config, seed, steps, [clock])
    cli.trainer.val_check_interval = max(1, math.ceil(steps / evaluations)) if evaluations else steps
    cli.trainer.limit_val_batches = 1.0 if evaluations else 0
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    if cli.trainer.global_step != steps:
        raise RuntimeError(f"Trained {cli.trainer.global_step} steps; expected {steps}.")
    if evaluations and (not clock.points or clock.points[-1]["steps"] < steps):
        cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    return {"steps": clock.steps, "points": clock.points}


def price(config: dict[str, Any], seed: int = 0) -> float:
    """Processor seconds of a step: the median over a short run but for its first ones."""
    return statistics.median(fit(config, seed, REHEARSED, 0)["steps"][WARM:])


class Study:
    """What there is of the results, which is written after each piece.

    Args:
        subject: what is studied.
        seeds: how many.
        rounds: rehearsals of each arm.
    """

    def __init__(self, subject: Subject, *, seeds: int, rounds: int) -> None:
        self.subject, self.seeds, self.rounds = subject, seeds, rounds
        self.arms = (BASELINE, *subject.arms)
        settings = {
            "budgets": dict(subject.budgets),
            "rounds": rounds,
            "rates": {t: [*r] for t, r in subject.rates.items()},
        }
        file = subject.results
        self.kept: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        if self.kept and self.kept["settings"] != settings:
            raise SystemExit(
                f"{file} is of {self.kept['settings']} and not of {settings}. Give the same, or take it away."
            )
        self.kept.setdefault("settings", settings)
        self.kept.setdefault("machine", tune.machine())
        self.kept.setdefault("tasks", {task: {"tuning": {}, "rounds": [], "runs": []} for task in subject.tasks})
        self.kept["seeds"] = seeds

    def config(self, task: str, arm: str, rate: float) -> dict[str, Any]:
        return config_of(self.subject.folder, task, arm, rate)

    def save(self) -> None:
        self.subject.results.parent.mkdir(exist_ok=True)
        part = self.subject.results.with_suffix(".part")
        part.write_text(json.dumps(self.kept, indent=1) + "\n")
        part.replace(self.subject.results)
        self.subject.page.write_text(page(self.subject, self.kept))

    def tune(self, task: str) -> float:
        """The learning rate of the lowest validation loss on seed 0, at the budget."""
        points = self.kept["tasks"][task]["tuning"]
        for rate in self.subject.rates[task]:
            if rate not in points:
                config = self.config(task, BASELINE, float(rate))
                cost = price(config)
                run = fit(config, 0, max(20, round(self.subject.budgets[task] / cost)), 1)
                points[rate] = {"price": cost, "steps": len(run["steps"]), **run["points"][-1]}
                self.save()
        return float(min(points, key=lambda rate: points[rate]["val_loss"]))

    def prices(self, task: str, rate: float) -> dict[str, float]:
        """Seconds of a step of each arm: the baseline's, times the median over rounds of what it takes beside it."""
        rounds = self.kept["tasks"][task]["rounds"]
        while len(rounds) < self.rounds:
            rounds.append({arm: price(self.config(task, arm, rate)) for arm in self.arms})
            self.save()
        base = statistics.median(one[BASELINE] for one in rounds)
        return {arm: base * statistics.median(one[arm] / one[BASELINE] for one in rounds) for arm in self.arms}

    def run(self, task: str, arm: str, seed: int, rate: float, prices: dict[str, float]) -> None:
        runs = self.kept["tasks"][task]["runs"]
        if any(one["arm"] == arm and one["seed"] == seed for one in runs):
            return
        plain, config = self.config(task, BASELINE, rate), self.config(task, arm, rate)
        before = price(plain)
        begun = time.perf_counter()
        found = fit(config, seed, max(20, round(self.subject.budgets[task] / prices[arm])), EVALUATIONS)
        wall = time.perf_counter() - begun
        busy = (before + price(plain)) / 2 / prices[BASELINE]
        spent = [0.0]
        for seconds in found["steps"]:
            spent.append(spent[-1] + seconds / busy)
        points = [{**point, "seconds": spent[point["steps"]]} for point in found["points"]]
        made = {"arm": arm, "seed": seed, "steps": len(found["steps"]), "busy": busy, "wall_seconds": wall}
        runs.append({**made, "points": points})
        self.save()

    def go_on(self) -> None:
        """Run whatever is missing."""
        for seed in range(1, self.seeds + 1):
            for task in self.subject.tasks:
                rate = self.tune(task)
                prices = self.prices(task, rate)
                for arm in self.arms:
                    self.run(task, arm, seed, rate, prices)
                    print(f"{task} {arm} {seed}: done", flush=True)


def curve(run: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's points as the bench's statistics take them."""
    return [{"seconds": point["seconds"], "metric": point["val_loss"]} for point in run["points"]]


def by_seed(runs: list[dict[str, Any]], arm: str) -> dict[int, list[dict[str, Any]]]:
    """The curves of an arm."""
    return {run["seed"]: curve(run) for run in runs if run["arm"] == arm}


def against(runs: list[dict[str, Any]], control: str, arm: str) -> Interval | None:
    """How many times as fast as ``control`` an arm is, over the seeds of both."""
    theirs, mine = by_seed(runs, control), by_seed(runs, arm)
    logs = paired_interval([math.log(speed_up(theirs[s], mine[s], "min")) for s in mine if s in theirs])
    return logs and Interval(math.exp(logs.estimate), math.exp(logs.low), math.exp(logs.high), logs.n)


def told(found: Interval | None) -> str:
    """An interval in words."""
    return "–" if found is None else f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"


def verdict(found: Interval | None) -> str:
    """Return the verdict of an interval."""
    if found is None:
        return "not enough runs"
    if found.low > 1:
        return "faster"
    return "slower" if found.high < 1 else "no measurable difference"


def accuracy(runs: list[dict[str, Any]], arm: str) -> Interval | None:
    """Return how many percentage points an arm ends above the baseline, over the seeds of both."""
    ends = {
        name: {run["seed"]: run["points"][-1]["val_accuracy"] for run in runs if run["arm"] == name}
        for name in (arm, BASELINE)
    }
    return paired_interval([100 * (end - ends[BASELINE][s]) for s, end in ends[arm].items() if s in ends[BASELINE]])


def row(runs: list[dict[str, Any]], arm: str, control: str) -> str:
    """Return the line of an arm in a task's table."""
    own = [run for run in runs if run["arm"] == arm]
    finals = [run["points"][-1] for run in own]
    losses = [point["val_loss"] for point in finals]
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    cells = [f"`{arm}`", str(len(own)), f"{statistics.fmean(run['steps'] for run in own):.0f}"]
    cells += [f"{statistics.fmean(losses):.3f}{spread}"]
    cells += [f"{100 * statistics.fmean(point['val_accuracy'] for point in finals):.1f} %"]
    if arm == BASELINE:
        return f"| {' | '.join([*cells, '', '', '', '', ''])} |"
    gained = accuracy(runs, arm)
    cells += ["–" if gained is None else f"{gained.estimate:+.1f} [{gained.low:+.1f}, {gained.high:+.1f}]"]
    base = by_seed(runs, BASELINE)
    pairs = [(base[run["seed"]], curve(run)) for run in own if run["seed"] in base]
    reached = [time_to(mine, theirs[-1]["metric"], "min") for theirs, mine in pairs]
    times = [seconds for seconds in reached if seconds is not None]
    missing = "" if len(times) == len(reached) else f" ({len(times)} of {len(reached)})"
    cells += [f"{statistics.fmean(times):.2f} s{missing}" if times else "not reached"]
    found = against(runs, BASELINE, arm)
    cells += [told(found), verdict(found)]
    beside = None if control == BASELINE else against(runs, control, arm)
    cells += [""] if control == BASELINE else [f"{told(beside)}, {verdict(beside)} (`{control}`)"]
    return f"| {' | '.join(cells)} |"


def page(subject: Subject, kept: dict[str, Any]) -> str:
    """Return the text of ``benchmarks/<name>.md``."""
    settings, machine = kept["settings"], kept["machine"]
    budgets = ", ".join(f"{settings['budgets'][task]:g} on *{title}*" for task, title in subject.tasks.items())
    parts = [
        f"# {subject.title}",
        "",
        f"Written by `python benchmarks/{subject.name}.py page` from [{subject.name}.json](results/{subject.name}.json)."
        f" {subject.words}",
        "",
        f"Each run has a budget of processor seconds on one thread: {budgets}. {settings['rounds']} rehearsals of each arm, in"
        " turns, decide the number of steps. Everything that a method does in training counts. Only the baseline's learning"
        " rate is tuned, and all arms use it. A ratio compares the seconds until the worse of the two final losses; above 1 is"
        f" faster. It has a 95 % interval over seeds, which is wide with {kept['seeds']} seeds. *Time* is the time to the"
        " baseline's final loss, and *gain* the difference in accuracy at the end, in percentage points. The verdicts are those"
        f" of small and short runs, on {machine.get('cpu', machine)} with torch {machine.get('torch', '?')}, while the machine"
        " was busy with other work.",
        "",
    ]
    arms = (BASELINE, *subject.arms)
    for task, title in subject.tasks.items():
        results = kept["tasks"][task]
        runs, planned = results["runs"], len(arms) * kept["seeds"]
        parts += [f"## {title}", ""]
        if results["tuning"]:
            ordered = sorted(results["tuning"], key=float)
            rates = ", ".join(f"{rate}: {results['tuning'][rate]['val_loss']:.3f}" for rate in ordered)
            best = min(ordered, key=lambda rate: results["tuning"][rate]["val_loss"])
            edge = ", at the edge of the grid" if best in (ordered[0], ordered[-1]) else ""
            parts += [
                f"Validation loss of the baseline by learning rate, on seed 0: {rates}. All arms use {best}{edge}.",
                "",
            ]
        if len(runs) < planned:
            parts += [f"**Incomplete**: {len(runs)} of {planned} runs exist.", ""]
        if not runs:
            continue
        parts += [
            "| arm | seeds | steps | final val_loss | accuracy | gain | time | over the baseline | verdict | over its"
            " control |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *[
                row(runs, arm, subject.controls.get(arm, BASELINE))
                for arm in arms
                if any(run["arm"] == arm for run in runs)
            ],
            "",
        ]
    return "\n".join(parts).rstrip() + "\n"


def main(subject: Subject, doc: str | None) -> None:
    """``run`` and ``page``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="tune, train and write the page; continues after an interruption")
    runner.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    runner.add_argument("--rounds", type=int, default=3, help="rehearsals of each arm (default: 3)")
    commands.add_parser("page", help=f"write benchmarks/{subject.name}.md")
    options = parser.parse_args()
    if options.command == "page":
        subject.page.write_text(page(subject, json.loads(subject.results.read_text())))
        return
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    Study(subject, seeds=options.seeds, rounds=options.rounds).go_on()
