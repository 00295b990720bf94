"""Does the bench find what was planted, where it was planted? Effects on speed, and effects on the metric.

    python benchmarks/planted.py [--repetitions 20] [--steps 200] [--jobs 1] [--out benchmarks/results/planted.json]

A small GPT is held against copies of itself to which something was done whose true effect is known:

- **speed**: a copy that is a tenth faster and one that takes a fifth longer. After its optimizer step, every arm spends as
  much more processor time as is a set share of what this very step took, so that the factor is kept whatever the steps take
  and whatever else the machine does; what share it came to is recorded. Trained bit for bit alike, these arms are judged
  by their speed.
- **metric**: a twin that draws other random numbers: as a member of the same family of runs it differs by 0 on average, by
  symmetry; a twin whose validation loss is lowered by a fixed amount all through the run: it differs by that amount on
  average; and a rate that is known to be worse: known means measured apart, on many seeds that no repetition uses, at the
  same number of steps; its standard error is recorded. These arms are judged by the metric, over seeds.

Each repetition is two whole benches with their own rehearsals, on seeds of its own, all at the same reference prices. Counted
is how often the interval holds what was planted, and the verdicts.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lightning import Trainer  # noqa: E402

from examples.gpt.data import StdlibText  # noqa: E402
from examples.gpt.module import GPT  # noqa: E402
from lightning_eff import Benchmark  # noqa: E402
from lightning_eff.bench import calibration  # noqa: E402
from lightning_eff.bench.arms import Arm  # noqa: E402
from lightning_eff.bench.pace import Budget, Pace  # noqa: E402
from lightning_eff.bench.references import References  # noqa: E402
from lightning_eff.bench.reports.statistics import speed_up  # noqa: E402
from lightning_eff.bench.running.jobs import Job, work  # noqa: E402
from lightning_eff.monitor.machine import fingerprint  # noqa: E402

BASE, FAST, SLOW = 1.1, 1.0, 1.1 * 1.2  #: times a plain step's time
SPEED = {"copy": 1.0, "fast": BASE / FAST, "slow": BASE / SLOW}  #: planted speed-ups
SHIFT = -0.15  #: of the validation loss
LR, WORSE = 1e-2, 1e-3
SEEDS = 3  #: of a bench on the metric
EVALUATIONS = 10  #: of its runs
APART = 10_000  #: the seeds after it are those on which the metric's effects are measured apart


@dataclass
class Spent:
    """Processor seconds of an arm's steps, and what was spent on top."""

    steps: float = 0.0
    more: float = 0.0


@dataclass
class Task:
    """A GPT and text, as small as it has to be for hundreds of runs."""

    spent: dict[str, Spent] = field(default_factory=dict)

    def arm(
        self, name: str, factor: float = 1.0, *, lr: float = LR, other: int = 0, shift: float = 0.0
    ) -> Callable[[], tuple[Trainer, GPT, StdlibText]]:
        """A function as the bench takes it.

        Args:
            name: under which the times are kept.
            factor: how many times its own time a step is to take, >= 1.
            lr: the peak of the learning rate.
            other: where not 0, the weights, the order of data and all else that is random are other draws.
            shift: is added to the validation loss.
        """
        spent = self.spent.setdefault(name, Spent())

        def build() -> tuple[Trainer, GPT, StdlibText]:
            if other:
                torch.manual_seed(torch.initial_seed() + 1_000_003 * other)
            trainer = Trainer(accelerator="cpu", devices=1, max_steps=1)
            model = Planted(factor, shift, spent, lr)
            return trainer, model, StdlibText(block_size=32, batch_size=8, max_bytes=500_000, num_eval_windows=64)

        return build


class Planted(GPT):
    """The example's GPT; it takes ``factor`` times its time, and its validation loss is higher by ``shift``."""

    def __init__(self, factor: float, shift: float, spent: Spent, lr: float) -> None:
        super().__init__(dim=32, num_layers=2, num_heads=2, block_size=32, lr=lr, warmup_steps=10, num_samples=0)
        self.factor, self.shift, self.spent = factor, shift, spent
        self.began = 0.0

    def on_train_start(self) -> None:
        self.began = time.thread_time()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Of this thread's processor time: another process that takes the core slows the step and the rest of it alike."""
        super().optimizer_step(*args, **kwargs)
        now = time.thread_time()
        own = now - self.began
        end = now + (self.factor - 1) * own
        while now < end:  # a sleep would give the core away, and the next step would find cold caches
            now = time.thread_time()
        self.spent.steps += own
        self.spent.more += now - (end - (self.factor - 1) * own)

    def on_train_batch_end(self, *args: Any) -> None:
        self.began = time.thread_time()  # the bench's own callback comes before, and the other arms' turns are in it

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch) + self.shift, batch_size=len(batch["input_ids"]))

    def on_validation_end(self) -> None:
        self.began = time.thread_time()


def speed_arms(task: Task) -> tuple[Any, dict[str, Any]]:
    """The baseline and the arms that differ in speed."""
    recipes = {name: task.arm(name, factor) for name, factor in (("copy", BASE), ("fast", FAST), ("slow", SLOW))}
    return task.arm("baseline", BASE), recipes


def metric_arms(task: Task) -> tuple[Any, dict[str, Any]]:
    """The baseline and the arms that differ in the metric."""
    recipes = {
        "twin": task.arm("twin", other=1),
        "lowered twin": task.arm("lowered twin", other=2, shift=SHIFT),
        "worse rate": task.arm("worse rate", lr=WORSE),
    }
    return task.arm("metric baseline"), recipes


def reference_price(file: Path) -> tuple[float, list[str]]:
    """Seconds of a plain step, kept in ``file`` as the reference of every bench here, and the kinds of steps."""
    task = Task()
    plain, tenth = metric_arms(task)[0], speed_arms(task)[0]
    arm = Arm("baseline", "baseline", plain)
    blocks = [work(Job(arm, 1, Pace("val_loss", steps=24, sweep=24), "price", 1)) for _ in range(4)]
    prices = calibration.prices(blocks)
    for source, factor in ((plain, 1.0), (tenth, BASE)):
        slower = [{**one, "seconds": one["seconds"] * factor} for one in prices]
        References(file).apply(Arm("baseline", "baseline", source), fingerprint(1), {"baseline": slower})
    return sum(price["seconds"] * price["share"] for price in prices), [price["kind"] for price in prices]


def repetition(number: int, steps: int, rounds: int, price: float, folder: str) -> dict[str, Any]:
    """Two benches on seeds of this repetition's own: what they found of each arm, their steps, and what was spent."""
    torch.set_num_threads(1)
    task = Task()
    found: dict[str, Any] = {}
    made: dict[str, int] = {}
    for kind, (baseline, recipes) in (("speed", speed_arms(task)), ("metric", metric_arms(task))):
        first = SEEDS * number + 1
        results = Benchmark(
            baseline,
            recipes,
            target="val_loss",
            budget=Budget(price * steps / (4 if kind == "speed" else 1), "reference"),
            seeds=[first, first + 1] if kind == "speed" else list(range(first, first + SEEDS)),
            evaluations=2 if kind == "speed" else EVALUATIONS,
            rounds=rounds,
            out=Path(folder) / f"{kind}{number}",
            reference=Path(folder) / "prices.json",
            threads=1,
        ).run(progress=False, report=False)
        made[kind] = results["calibration"]["baseline"]["steps"]
        for name in recipes:
            one = results["summary"][name]
            found[name] = {key: one[key] for key in ("speedup", "difference", "verdict", "speedup_from")}
    spent = {name: [one.steps, one.more] for name, one in task.spent.items() if name in SPEED or name == "baseline"}
    return {"found": found, "steps": made, "spent": spent}


def apart(seed: int, steps: int, price: float, kinds: list[str]) -> dict[str, tuple[float, float]]:
    """Of each arm on the metric: its difference from the baseline and the logarithm of its speed-up, on one seed."""
    torch.set_num_threads(1)
    baseline, recipes = metric_arms(Task())
    prices = dict.fromkeys(kinds, price)
    pace = Pace("val_loss", price * steps, True, prices, kinds, steps, evaluations=EVALUATIONS)
    points: dict[str, list[Any]] = {}
    for name, source in {"baseline": baseline, **recipes}.items():
        record = work(Job(Arm(name, "recipe", source), seed, pace, name, 1))
        if record["status"] != "finished":
            raise RuntimeError(f"{name}, seed {seed}: {record['error']}")
        points[name] = record["points"]
    base = points.pop("baseline")
    return {
        name: (own[-1]["metric"] - base[-1]["metric"], math.log(speed_up(base, own, "min")))
        for name, own in points.items()
    }


def mean(values: Sequence[float]) -> dict[str, float]:
    """Mean, its standard error, and the values' deviation."""
    deviation = statistics.stdev(values)
    return {"mean": statistics.fmean(values), "error": deviation / math.sqrt(len(values)), "deviation": deviation}


def planted(apart: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The true effects of the metric's arms: by symmetry, by construction, or measured apart."""
    return {
        "twin": {"difference": 0.0, "speedup": 1.0},
        "lowered twin": {"difference": SHIFT, "speedup": math.exp(apart["lowered twin"]["log_speedup"]["mean"])},
        "worse rate": {
            "difference": apart["worse rate"]["difference"]["mean"],
            "speedup": math.exp(apart["worse rate"]["log_speedup"]["mean"]),
        },
    }


def counted(intervals: Sequence[dict[str, float] | None], truth: float) -> dict[str, Any]:
    """How often the intervals hold the truth, and where they lie."""
    known = [one for one in intervals if one is not None]
    return {
        "planted": truth,
        "held": sum(one["low"] <= truth <= one["high"] for one in known),
        "of": len(intervals),
        "mean": statistics.fmean(one["estimate"] for one in known),
        "mean_width": statistics.fmean(one["high"] - one["low"] for one in known),
    }


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Of each arm: coverage of what was planted, and the verdicts."""
    truths = {name: {"speedup": value} for name, value in SPEED.items()} | planted(record["apart"])
    told = {}
    for name, figures in truths.items():
        found = record["found"][name]
        words = [one["verdict"] for one in found]
        told[name] = {
            **{figure: counted([one[figure] for one in found], truth) for figure, truth in figures.items()},
            "verdicts": {word: words.count(word) for word in sorted(set(words))},
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="of a run on the metric; one on speed has a quarter")
    parser.add_argument("--rounds", type=int, default=8, help="rehearsals of each arm, as is the bench's default")
    parser.add_argument("--seeds-apart", type=int, default=32, help="on which the metric's effects are measured apart")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes; they disturb each other, as a busy machine does"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "planted.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        price, kinds = reference_price(Path(folder) / "prices.json")
        seeds = range(APART + 1, APART + options.seeds_apart + 1)
        alone = [pool.submit(apart, seed, options.steps, price, kinds) for seed in seeds]
        whole = [
            pool.submit(repetition, number, options.steps, options.rounds, price, folder)
            for number in range(options.repetitions)
        ]
        told = []
        for one in as_completed(alone):
            told.append(one.result())
            print(f"measured apart: {len(told)}/{len(alone)}", flush=True)
        record = {
            "machine": fingerprint(1),
            "rounds": options.rounds,
            "jobs": options.jobs,
            "step_seconds": price,
            "seeds": SEEDS,
            "shift": SHIFT,
            "rates": [LR, WORSE],
            "seeds_apart": len(told),
            "apart": {
                name: {
                    figure: mean([one[name][at] for one in told])
                    for at, figure in enumerate(("difference", "log_speedup"))
                }
                for name in told[0]
            },
        }
        done: list[dict[str, Any]] = []
        for one in as_completed(whole):
            done.append(one.result())
            options.out.write_text(json.dumps(finished(record, done), indent=1) + "\n")
            print(
                f"{len(done)}/{options.repetitions}",
                {n: o["verdict"] for n, o in done[-1]["found"].items()},
                flush=True,
            )
    print(json.dumps(finished(record, done)["summary"], indent=1))


def finished(record: dict[str, Any], done: list[dict[str, Any]]) -> dict[str, Any]:
    """The record with the repetitions that are done."""
    names = list(done[0]["found"])
    spent = {name: [sum(one["spent"][name][at] for one in done) for at in (0, 1)] for name in done[0]["spent"]}
    record = {
        **record,
        "repetitions": len(done),
        "steps": {kind: [one["steps"][kind] for one in done] for kind in done[0]["steps"]},
        "spent": {name: (steps + more) / steps for name, (steps, more) in spent.items()},
        "found": {name: [one["found"][name] for one in done] for name in names},
    }
    return {**record, "summary": summary(record)}


if __name__ == "__main__":
    main()
