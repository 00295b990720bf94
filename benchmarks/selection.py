"""Does it pay to choose samples where labels are wrong, or data redundant? Each method beside a random choice of as many.

    python benchmarks/selection.py run [--budget 6] [--seeds 3] [--rounds 3] [--rates 0.003,0.006,0.012]
    python benchmarks/selection.py page

Two tasks, in ``benchmarks/spoilt``: noisy digits of which one training label in five is wrong, and noisy digits half of whose
training set is copies of 32 images. ``run`` tunes the baseline's learning rate on a seed that no evaluation uses, tells by
rehearsals in turns how many steps of each arm the budget holds, and trains the baseline, every recipe in
``benchmarks/spoilt/recipes`` and the random choices among them, seed by seed. All is one process of one torch thread. After a
kill the same command goes on where it was: ``benchmarks/results/selection.json`` is written after each piece.

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
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tune  # noqa: E402
from lightning_eff.bench.reports.intervals import Interval, paired_interval  # noqa: E402
from lightning_eff.bench.reports.statistics import speed_up, time_to  # noqa: E402

FILE, PAGE = ROOT / "benchmarks" / "results" / "selection.json", ROOT / "benchmarks" / "selection.md"
FOLDER = ROOT / "benchmarks" / "spoilt"
TASKS = {
    "wrong": "One training label in five is wrong",
    "repeated": "Half of the training set is copies of 32 images",
}
BASELINE, HALF, DATA = "baseline", "random_half", "random_data"
#: Each recipe's random control; the baseline where as many samples are trained on.
CONTROLS = {
    "selective_backprop": HALF,
    "ordered_sgd": HALF,
    "loss_biased_sampling": HALF,
    "importance_sampling": HALF,
    "rho_loss": HALF,
    "proxy_selection": HALF,
    "auto_assist": HALF,
    "data_pruning": DATA,
    "robust_importance_sampling": BASELINE,
}
ARMS = (BASELINE, HALF, DATA, *CONTROLS)
REHEARSED, WARM, PLAIN, EVALUATIONS = 24, 8, 24, 8


def config_of(task: str, arm: str, rate: float | None = None) -> dict[str, Any]:
    """The whole config of an arm."""
    config = yaml.safe_load((FOLDER / f"{task}.yaml").read_text())
    if arm != BASELINE:
        config = tune.merged(config, yaml.safe_load((FOLDER / "recipes" / f"{arm}.yaml").read_text()))
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
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        settings = {"budget": options.budget, "rounds": options.rounds, "rates": options.rates}
        self.kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
        if self.kept and self.kept["settings"] != settings:
            raise SystemExit(
                f"{FILE} is of {self.kept['settings']} and not of {settings}. Give the same, or take it away."
            )
        self.kept.setdefault("settings", settings)
        self.kept.setdefault("machine", tune.machine())
        self.kept.setdefault("tasks", {task: {"tuning": {}, "rounds": [], "runs": []} for task in TASKS})
        self.kept["seeds"] = options.seeds

    def save(self) -> None:
        part = FILE.with_suffix(".part")
        part.write_text(json.dumps(self.kept, indent=1) + "\n")
        part.replace(FILE)
        PAGE.write_text(page(self.kept))

    def tune(self, task: str) -> float:
        """The learning rate of the lowest validation loss on seed 0, at the budget."""
        points = self.kept["tasks"][task]["tuning"]
        for rate in self.options.rates.split(","):
            if rate not in points:
                config = config_of(task, BASELINE, float(rate))
                cost = price(config)
                run = fit(config, 0, max(20, round(self.options.budget / cost)), 1)
                points[rate] = {"price": cost, "steps": len(run["steps"]), **run["points"][-1]}
                self.save()
        return float(min(points, key=lambda rate: points[rate]["val_loss"]))

    def prices(self, task: str, rate: float) -> dict[str, float]:
        """Seconds of a step of each arm: the baseline's, times the median over rounds of what it takes beside it."""
        rounds = self.kept["tasks"][task]["rounds"]
        while len(rounds) < self.options.rounds:
            rounds.append({arm: price(config_of(task, arm, rate)) for arm in ARMS})
            self.save()
        base = statistics.median(one[BASELINE] for one in rounds)
        return {arm: base * statistics.median(one[arm] / one[BASELINE] for one in rounds) for arm in ARMS}

    def run(self, task: str, arm: str, seed: int, rate: float, prices: dict[str, float]) -> None:
        runs = self.kept["tasks"][task]["runs"]
        if any(one["arm"] == arm and one["seed"] == seed for one in runs):
            return
        plain, config = config_of(task, BASELINE, rate), config_of(task, arm, rate)
        before = price(plain)
        begun = time.perf_counter()
        found = fit(config, seed, max(20, round(self.options.budget / prices[arm])), EVALUATIONS)
        wall = time.perf_counter() - begun
        busy = (before + price(plain)) / 2 / prices[BASELINE]
        spent = [0.0]
        for seconds in found["steps"]:
            spent.append(spent[-1] + seconds / busy)
        points = [{**point, "seconds": spent[point["steps"]]} for point in found["points"]]
        runs.append(
            {
                "arm": arm,
                "seed": seed,
                "steps": len(found["steps"]),
                "busy": busy,
                "wall_seconds": wall,
                "points": points,
            }
        )
        self.save()


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
    """What an interval says."""
    if found is None:
        return "not enough runs"
    if found.low > 1:
        return "faster"
    return "slower" if found.high < 1 else "no difference shown"


def row(runs: list[dict[str, Any]], arm: str) -> str:
    """The line of an arm in a task's table."""
    own = [run for run in runs if run["arm"] == arm]
    finals = [run["points"][-1] for run in own]
    losses = [point["val_loss"] for point in finals]
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    cells = [f"`{arm}`", str(len(own)), f"{statistics.fmean(run['steps'] for run in own):.0f}"]
    cells += [f"{statistics.fmean(losses):.3f}{spread}"]
    cells += [f"{100 * statistics.fmean(point['val_accuracy'] for point in finals):.1f} %"]
    base = by_seed(runs, BASELINE)
    pairs = [(base[run["seed"]], curve(run)) for run in own if run["seed"] in base]
    reached = [time_to(mine, theirs[-1]["metric"], "min") for theirs, mine in pairs]
    times = [seconds for seconds in reached if seconds is not None]
    missing = "" if len(times) == len(reached) else f" ({len(times)} of {len(reached)})"
    cells += [f"{statistics.fmean(times):.2f} s{missing}" if times else "not reached"]
    if arm == BASELINE:
        return f"| {' | '.join([*cells, '', '', '', ''])} |"
    found = against(runs, BASELINE, arm)
    cells += [told(found), verdict(found)]
    control = CONTROLS.get(arm, BASELINE)
    beside = None if control == BASELINE else against(runs, control, arm)
    cells += ["", ""] if control == BASELINE else [told(beside), f"{verdict(beside)} than `{control}`"]
    return f"| {' | '.join(cells)} |"


def page(kept: dict[str, Any]) -> str:
    """``benchmarks/selection.md``."""
    settings, machine = kept["settings"], kept["machine"]
    parts = [
        "# Choosing samples where labels are wrong, or data redundant",
        "",
        "Written by `python benchmarks/selection.py page` from [selection.json](results/selection.json). A ViT of 2 blocks of"
        " width 32 on scikit-learn's digits, shifted and under noise, 256 a batch; validation is clean. Each method trains on"
        " half of a batch (`auto_assist` on as many as it picks, `data_pruning` on half of the data set from the fourth epoch"
        " on) and stands beside a random choice of as many, which costs no score; `robust_importance_sampling` draws whole"
        " batches, so the baseline is its control. Settings are not tuned, but for the baseline's learning rate, which all"
        " arms have.",
        "",
        f"{settings['budget']:g} seconds of processor time for each run, on one thread, by {settings['rounds']} rehearsals of"
        " each arm in turns; all that a method does in training is counted, such as the models of `rho_loss`. Ratios are of"
        " the seconds that the one needs for the final loss of the other, above 1 is faster, with 95 % intervals over seeds;"
        " with three seeds these are wide. *Time* is until the baseline's final loss. Verdicts are of these small and short"
        f" runs. {machine.get('cpu', machine)}, torch {machine.get('torch', '?')}, a machine that was busy with other work.",
        "",
    ]
    for task, title in TASKS.items():
        results = kept["tasks"][task]
        runs, planned = results["runs"], len(ARMS) * kept["seeds"]
        parts += [f"## {title}", ""]
        if results["tuning"]:
            rates = ", ".join(f"{rate}: {point['val_loss']:.3f}" for rate, point in results["tuning"].items())
            parts += [f"Validation loss of the baseline by learning rate, on seed 0: {rates}.", ""]
        if len(runs) < planned:
            parts += [f"**Not complete**: {len(runs)} of {planned} runs were made.", ""]
        if not runs:
            continue
        parts += [
            "| arm | seeds | steps | final val_loss | accuracy | time | over the baseline | verdict | over its control |"
            " verdict |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *[row(runs, arm) for arm in ARMS if any(run["arm"] == arm for run in runs)],
            "",
        ]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="tune, train and write the page")
    runner.add_argument("--budget", type=float, default=6.0, help="processor seconds of each run (default: 6)")
    runner.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    runner.add_argument("--rounds", type=int, default=3, help="rehearsals of each arm (default: 3)")
    runner.add_argument("--rates", default="0.003,0.006,0.012", help="learning rates that the baseline is tuned over")
    commands.add_parser("page", help="write benchmarks/selection.md")
    options = parser.parse_args()
    if options.command == "page":
        PAGE.write_text(page(json.loads(FILE.read_text())))
        return
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    study = Study(options)
    for seed in range(1, options.seeds + 1):
        for task in TASKS:
            rate = study.tune(task)
            prices = study.prices(task, rate)
            for arm in ARMS:
                study.run(task, arm, seed, rate, prices)
                print(f"{task} {arm} {seed}: done", flush=True)


if __name__ == "__main__":
    main()
