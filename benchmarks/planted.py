"""Does the bench find what was planted, where it was planted? Effects on speed, and effects on the metric.

    python benchmarks/planted.py [--kinds speed metric] [--repetitions 20] [--steps 200] [--jobs 1] [--out ...]

A small GPT is held against copies of itself to which something was done whose true effect is known:

- **speed**: a copy that is a tenth faster and one that takes a fifth longer. After its optimizer step, every arm goes on
  spending processor time until the step has had a set number of times what steps of all arms took of late, so that the
  factor is kept whatever the steps take and whatever else the machine does. What the steps came to, in processor time, is
  recorded, as a check of what is planted. Trained bit for bit alike, these arms are judged by their speed.
- **metric**: a twin that draws other random numbers: as a member of the same family of runs it differs by 0 on average, by
  symmetry; a twin whose validation loss is lowered by a fixed amount all through the run: it differs by that amount on
  average; and a rate that is known to be worse: known means measured apart, on many seeds that no repetition uses, at the
  same number of steps; its standard error is recorded. These arms are judged by the metric, over seeds.

Each repetition is a whole bench of each kind with its own rehearsals, on seeds of its own, all at the same reference prices.
Counted is how often the interval holds what was planted, and the verdicts. A kind that is not run keeps its figures in the
file.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import deque
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
from torch import Tensor  # noqa: E402

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

BASE, FAST, SLOW = 2.2, 2.0, 2.2 * 1.2
SPEED = {"copy": 1.0, "fast": BASE / FAST, "slow": BASE / SLOW}  #: planted speed-ups
SHIFT = -0.15  #: of the validation loss
LR, WORSE = 1e-2, 1e-3
SEEDS = 3  #: of a bench on the metric
EVALUATIONS = 10  #: of its runs
APART = 10_000  #: the seeds after it are those on which the metric's effects are measured apart


@dataclass
class Spent:
    """Processor seconds of an arm's steps, and what was spent on top; how many steps."""

    steps: float = 0.0
    more: float = 0.0
    count: int = 0


@dataclass
class Task:
    """A GPT and text, as small as it has to be for hundreds of runs."""

    spent: dict[str, Spent] = field(default_factory=dict)
    late: deque[float] = field(default_factory=lambda: deque(maxlen=64))  #: processor seconds of all arms' latest steps

    def arm(
        self, name: str, factor: float = 1.0, *, lr: float = LR, other: int = 0, shift: float = 0.0
    ) -> Callable[[], tuple[Trainer, GPT, StdlibText]]:
        """A function as the bench takes it.

        Args:
            name: under which the times are kept.
            factor: how many times a plain step's time one is to take, >= 1.
            lr: the peak of the learning rate.
            other: where not 0, the weights, the order of data and all else that is random are other draws.
            shift: is added to the validation loss.
        """
        spent = self.spent.setdefault(name, Spent())

        def build() -> tuple[Trainer, GPT, StdlibText]:
            if other:
                torch.manual_seed(torch.initial_seed() + 1_000_003 * other)
            trainer = Trainer(accelerator="cpu", devices=1, max_steps=1)
            model = Planted(factor, shift, spent, self.late, lr)
            return trainer, model, StdlibText(block_size=32, batch_size=8, max_bytes=500_000, num_eval_windows=64)

        return build


class Planted(GPT):
    """The example's GPT; it takes ``factor`` times a plain step's time, and its validation loss is higher by ``shift``."""

    def __init__(self, factor: float, shift: float, spent: Spent, late: deque[float], lr: float) -> None:
        super().__init__(dim=32, num_layers=2, num_heads=2, block_size=32, lr=lr, warmup_steps=10, num_samples=0)
        self.factor, self.shift, self.spent, self.late = factor, shift, spent, late
        self.began = 0.0
        self.batch: Any = None

    def on_train_start(self) -> None:
        self.began = time.thread_time()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch = batch
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Of this thread's processor time: another process that takes the core slows the step and the rest of it alike.

        What steps of all arms took of late is what the factor is of. An arm's own would not do: the longer a step takes, the
        colder are the caches that the next one finds, by 1 % in an arm that is planted a fifth slower, and the factor would
        be of that too. It is spent on forward passes as long as one fits, which keeps caches warmer than an empty loop does.
        """
        super().optimizer_step(*args, **kwargs)
        if self.factor == 1:
            return
        begun = now = time.thread_time()
        own = now - self.began
        self.late.append(own)
        end = self.began + self.factor * statistics.median(self.late)
        one = 0.0
        with torch.no_grad():
            while now + one < end:
                self._loss(self.batch)
                now, one = time.thread_time(), time.thread_time() - now
        while now < end:
            now = time.thread_time()
        self.spent.steps += own
        self.spent.more += now - begun
        self.spent.count += 1

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


def repetition(number: int, kind: str, steps: int, rounds: int, price: float, folder: str) -> dict[str, Any]:
    """A bench on seeds of this repetition's own: what it found of each arm, its steps, and what was spent."""
    torch.set_num_threads(1)
    task = Task()
    baseline, recipes = (speed_arms if kind == "speed" else metric_arms)(task)
    first = SEEDS * number + 1
    results = Benchmark(
        baseline,
        recipes,
        target="val_loss",
        budget=Budget(price * (BASE * steps / 4 if kind == "speed" else steps), "reference"),
        seeds=[first, first + 1] if kind == "speed" else list(range(first, first + SEEDS)),
        evaluations=2 if kind == "speed" else EVALUATIONS,
        rounds=rounds,
        out=Path(folder) / f"{kind}{number}",
        reference=Path(folder) / "prices.json",
        threads=1,
    ).run(progress=False, report=False)
    found = {name: results["summary"][name] for name in recipes}
    return {
        "found": {
            name: {key: one[key] for key in ("speedup", "difference", "verdict", "speedup_from")}
            for name, one in found.items()
        },
        "steps": results["calibration"]["baseline"]["steps"],
        "spent": {name: [one.steps, one.more, one.count] for name, one in task.spent.items()},
    }


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


def truths(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The true effects of each arm: on speed by construction; on the metric by symmetry, by construction, or measured."""
    if record["kind"] == "speed":
        return {name: {"speedup": value} for name, value in SPEED.items()}
    apart = record["apart"]
    return {
        "twin": {"difference": 0.0, "speedup": 1.0},
        "lowered twin": {"difference": SHIFT, "speedup": math.exp(apart["lowered twin"]["log_speedup"]["mean"])},
        "worse rate": {
            "difference": apart["worse rate"]["difference"]["mean"],
            "speedup": math.exp(apart["worse rate"]["log_speedup"]["mean"]),
        },
    }


def realised(spent: Sequence[dict[str, Sequence[float]]], name: str) -> float:
    """The baseline's processor time of a step by the arm's, over all repetitions, what was spent on top included."""

    def seconds(of: str) -> float:
        steps, more, count = (sum(part) for part in zip(*(one[of] for one in spent), strict=True))
        return (steps + more) / count

    return seconds("baseline") / seconds(name)


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
    told = {}
    for name, figures in truths(record).items():
        found = record["found"][name]
        words = [one["verdict"] for one in found]
        told[name] = {
            **{figure: counted([one[figure] for one in found], truth) for figure, truth in figures.items()},
            "verdicts": {word: words.count(word) for word in sorted(set(words))},
        }
        if record["kind"] == "speed":
            told[name]["realised"] = realised(record["spent"], name)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("speed", "metric"), default=["speed", "metric"])
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
        price, steps = reference_price(Path(folder) / "prices.json")
        seeds = range(APART + 1, APART + options.seeds_apart + 1) if "metric" in options.kinds else ()
        alone = [pool.submit(apart, seed, options.steps, price, steps) for seed in seeds]
        whole = {
            pool.submit(repetition, number, kind, options.steps, options.rounds, price, folder): kind
            for kind in options.kinds
            for number in range(options.repetitions)
        }
        told = []
        for one in as_completed(alone):
            told.append(one.result())
            print(f"measured apart: {len(told)}/{len(alone)}", flush=True)
        common = {"machine": fingerprint(1), "rounds": options.rounds, "jobs": options.jobs, "step_seconds": price}
        records = {kind: {"kind": kind, **common, "repetitions": 0} for kind in options.kinds}
        if told:
            records["metric"] |= {
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
        for one in as_completed(whole):
            record = records[whole[one]]
            add(record, one.result())
            before = json.loads(options.out.read_text()) if options.out.is_file() else {}
            options.out.write_text(json.dumps({**before, record["kind"]: record}, indent=1) + "\n")
            verdicts = {name: found[-1]["verdict"] for name, found in record["found"].items()}
            print(f"{record['kind']} {record['repetitions']}/{options.repetitions}", verdicts, flush=True)
    print(json.dumps({kind: record["summary"] for kind, record in records.items()}, indent=1))


def add(record: dict[str, Any], one: dict[str, Any]) -> None:
    """Put a repetition into the record of its kind."""
    record["repetitions"] += 1
    for name, found in one["found"].items():
        record.setdefault("found", {}).setdefault(name, []).append(found)
    record.setdefault("steps", []).append(one["steps"])
    if record["kind"] == "speed":
        record.setdefault("spent", []).append(one["spent"])
    record["summary"] = summary(record)


if __name__ == "__main__":
    main()
