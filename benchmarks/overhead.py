"""What idle techniques cost a step: Python calls and torch operations beside plain Lightning's, and processor time.

    python benchmarks/overhead.py [--turns 15] [--steps 20] [--out benchmarks/results/overhead.json]

The module is the examples' GPT of ``--layers`` blocks; the techniques are all that can be set so that they train plainly.
Calls of Python functions and of built-ins (by ``sys.setprofile`` on the thread that trains) and torch operations (by a
``TorchDispatchMode``, and so those that autograd runs too) are counted over the steps after the first ones, in one run of
each arm: a busy machine does not change them. Lightning itself makes about a hundred calls a step for each callback, also an
empty one, which a third arm shows, with as many empty callbacks as there are techniques; an idle technique's hooks are not
called, and Lightning's asking for them is twelve built-ins a step. Processor time of the process is taken in short turns
A B, B A, ..., each a run; each turn gives one ratio.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff as eff
from examples.gpt.data import StdlibText
from examples.gpt.module import GPT
from lightning_eff.monitor.machine import fingerprint


def idle(num_layers: int) -> list[Callback]:
    """Every technique in settings that make it plain training."""
    return [
        eff.ProgressiveStacking(stages=[(0.0, num_layers)]),
        eff.ProgressiveLayerDropping(theta_min=1.0),
        eff.LatestWeightAveraging(start=1.0),
        eff.ImportanceSampling(threshold=inf),
        eff.SelectiveBackprop(keep=1.0),
        eff.SharpnessAwareMinimization(rho=0.0),
        eff.SequenceLengthWarmup(until=0.0),
        eff.Rematerialization(policy="optimal", memory_budget=1.0),
        eff.ActivationOffload(min_bytes=inf),
    ]


class Clock(Callback):
    """Seconds from the end of the first steps, which warm up, to the end of the last: of the clock and of the processor."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.steps = warm_up, 0
        self.began = self.ended = (0.0, 0.0)

    def on_train_batch_end(self, *args: object) -> None:
        self.steps += 1
        self.ended = time.perf_counter(), time.process_time()
        if self.steps == self.warm_up:
            self.began = self.ended

    @property
    def seconds(self) -> float:
        return self.ended[0] - self.began[0]

    @property
    def processor_seconds(self) -> float:
        return self.ended[1] - self.began[1]


class Operations(TorchDispatchMode):
    """How many operations torch ran."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls(Callback):
    """Python calls, or torch operations, of all steps but the first ``warm_up`` and the last.

    Counted from the end of a batch to the end of another, so that what comes between steps is in it.
    """

    def __init__(self, warm_up: int, steps: int, what: str) -> None:
        self.warm_up, self.last, self.what = warm_up, warm_up + steps, what
        self.seen, self.count = 0, 0
        self.where: Counter[str] = Counter()
        self._mode: Operations | None = None

    def on_train_batch_end(self, *args: object) -> None:
        self.seen += 1
        if self.seen == self.warm_up:
            if self.what in ("functions", "built-ins"):
                sys.setprofile(self._see)
            else:
                self._mode = Operations()
                self._mode.__enter__()
        elif self.seen == self.last:
            if self._mode is None:
                sys.setprofile(None)
            else:
                self.count = self._mode.count
                self._mode.__exit__(None, None, None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == ("call" if self.what == "functions" else "c_call"):
            self.count += 1
            self.where[frame.f_code.co_filename] += 1


def train(techniques: list[Callback], watcher: Callback, steps: int, args: argparse.Namespace) -> None:
    """Train the module for so many steps."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, watcher],
    )
    model = GPT(dim=args.dim, num_layers=args.layers, num_heads=2, block_size=args.length, num_samples=0)
    trainer.fit(model, StdlibText(block_size=args.length, batch_size=args.batch_size, max_bytes=2_000_000))


def steps_per_second(techniques: list[Callback], args: argparse.Namespace) -> float:
    """Steps after those that warm up, by the clock."""
    clock = Clock(args.warm_up)
    train(techniques, clock, args.warm_up + args.steps, args)
    return args.steps / clock.seconds


def counted(techniques: list[Callback], what: str, args: argparse.Namespace) -> float:
    """Python ``"functions"`` or ``"built-ins"``, or torch ``"operations"``, that are called in a step."""
    calls = Calls(args.warm_up, args.steps, what)
    train(techniques, calls, args.warm_up + args.steps, args)
    return calls.count / args.steps


def processor_ms(techniques: list[Callback], args: argparse.Namespace) -> float:
    """Milliseconds of the processor a step."""
    clock = Clock(args.warm_up)
    train(techniques, clock, args.warm_up + args.steps, args)
    return 1e3 * clock.processor_seconds / args.steps


def counts(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Of each arm what a machine's load does not change, a step."""
    found: dict[str, dict[str, float]] = {}
    names = {
        "functions": "python_calls_per_step",
        "built-ins": "built_in_calls_per_step",
        "operations": "torch_operations_per_step",
    }
    for what, name in names.items():
        techniques = idle(args.layers)
        plain, empty = counted([], what, args), counted([Callback() for _ in techniques], what, args)
        ours = counted(techniques, what, args)
        found[name] = {
            "plain": plain,
            "empty_callbacks": empty,
            "idle": ours,
            "idle_over_plain": ours / plain,
            "idle_over_empty_callbacks": ours / empty,
        }
    return found


def turns(args: argparse.Namespace) -> dict[str, Any]:
    """Processor time of both arms in turns; the first turn warms the process up and does not count."""
    times: dict[str, list[float]] = {"plain": [], "idle": []}
    for turn in range(args.turns + 1):
        for arm in ("plain", "idle") if turn % 2 else ("idle", "plain"):
            ms = processor_ms([] if arm == "plain" else idle(args.layers), args)
            if turn:
                times[arm].append(ms)
    ratios = sorted(ours / plain for plain, ours in zip(times["plain"], times["idle"], strict=True))
    quarter = len(ratios) // 4
    return {
        "turns": args.turns,
        "median_ms": {arm: statistics.median(values) for arm, values in times.items()},
        "median_ratio": statistics.median(ratios),
        "middle_half_of_ratios": [ratios[quarter], ratios[-1 - quarter]],
        "ratios": ratios,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    args = parser().parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "turns", "threads")}
    result = {
        "benchmark": "overhead",
        "techniques": [type(technique).__name__ for technique in idle(args.layers)],
        "settings": settings,
        **counts(args),
        "processor_time": turns(args),
        "machine": fingerprint(args.threads),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
