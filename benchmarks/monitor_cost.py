"""What the monitor costs: steps/s of a Trainer with EfficiencyMonitor over the same without.

    python benchmarks/monitor_cost.py [--pairs 9] [--steps 40]

The two arms alternate, A B A B, in one process; each pair gives one ratio. On a machine that others use too these tell
little; the tenth percentile of all steps' times, which others disturb least, stands beside them. The first steps of
each run, in which FLOPs are counted among others, warm up and are not timed: the monitor tells their cost apart, here as
``counting_seconds``. Prints the median and the spread, and with ``--out`` writes them with the machine's fingerprint as
JSON.
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.overhead import steps_per_second
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from lightning_eff.monitor.machine import fingerprint


class StepTimes(Callback):
    """Seconds of each step after those that warm up, from one batch's end to the next."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.ends = warm_up, list[float]()

    def on_train_batch_end(self, *args: object) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        ends = self.ends[self.warm_up :]
        return [b - a for a, b in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    plain: list[float] = []
    watched: list[float] = []
    counting: list[float] = []
    fast: tuple[list[float], list[float]] = ([], [])
    for pair in range(args.pairs + 1):
        monitor, clocks = EfficiencyMonitor(), (StepTimes(args.warm_up), StepTimes(args.warm_up))
        with contextlib.redirect_stdout(io.StringIO()):  # its closing table
            a = steps_per_second([clocks[0]], args)
            b = steps_per_second([clocks[1], monitor], args)
        if not pair:  # the first pair warms the process up
            continue
        plain.append(a)
        watched.append(b)
        counting.append(monitor.summary()["counting_seconds"])
        for arm, times in zip(fast, clocks, strict=True):
            arm.extend(times.seconds())
        print(f"pair {pair}/{args.pairs}: plain {a:.2f} steps/s, monitor {b:.2f}, ratio {b / a:.4f}", flush=True)
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    tenths = [statistics.quantiles(arm, n=10)[0] for arm in fast]
    result = {
        "benchmark": "monitor_cost",
        "median_ratio": statistics.median(ratios),
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "tenth_percentile_seconds": {"plain": tenths[0], "monitor": tenths[1], "ratio": tenths[0] / tenths[1]},
        "median_steps_per_second": {"plain": statistics.median(plain), "monitor": statistics.median(watched)},
        "median_counting_seconds": statistics.median(counting),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "machine": fingerprint(torch.get_num_threads()),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
