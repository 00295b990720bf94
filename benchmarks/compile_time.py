"""What compiling a reference task's blocks takes: from an empty cache of compiled code, and from a filled one.

    python benchmarks/compile_time.py [--task gpt] [--recipe recipes/compile.yaml] [--pairs 3] [--out FILE]

Each pair is two processes with one cache of torch's compiler between them, a new folder: the first finds it empty, the second
finds what the first has left. Each trains two steps on one thread and tells what :class:`RegionalCompilation` says that its
set-up took, and the processor time of the process and of the compilers that it starts, over the first step less the second:
what that takes on a core of its own, however busy the machine is. The runs of a bench find a filled cache, since rehearsals
came before. Prints medians and every figure, and writes them, by default to ``benchmarks/results/compile_time.json``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OUT = ROOT / "benchmarks" / "results" / "compile_time.json"


def processor_seconds() -> float:
    """Of this process and of those that it has started and seen end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def one(paths: list[str]) -> dict[str, float]:
    """Train two steps of a config; what compiling took, in seconds of set-up and of processors."""
    import torch
    from lightning.pytorch import Callback

    import lightning_eff
    from lightning_eff.bench.arms import Arm

    class Marks(Callback):
        """Processor seconds at the beginning and at the end of each step."""

        def __init__(self) -> None:
            self.steps: list[float] = []

        def on_train_batch_start(self, *_: object) -> None:
            self.begun = processor_seconds()

        def on_train_batch_end(self, *_: object) -> None:
            self.steps.append(processor_seconds() - self.begun)

    torch.set_num_threads(1)
    trainer, module, data = Arm("compiled", "recipe", tuple(paths)).build(seed=1)
    marks = Marks()
    (technique,) = (c for c in trainer.callbacks if isinstance(c, lightning_eff.RegionalCompilation))  # pyright: ignore[reportAttributeAccessIssue]
    trainer.callbacks.append(marks)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit(module, **data)
    first, second = marks.steps
    return {"setup_seconds": technique.report()["setup_seconds"], "processor_seconds": first - second}


def measured(task: str, recipe: str, pairs: int) -> dict[str, list[dict[str, float]]]:
    """What compiling took in each process, by what it found: "empty" or "filled"."""
    found: dict[str, list[dict[str, float]]] = {"empty": [], "filled": []}
    trainer = {"max_steps": 2, "limit_val_batches": 0, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    for pair in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            short = Path(folder) / "short.yaml"
            short.write_text(json.dumps({"trainer": trainer}))
            paths = [
                str(ROOT / "benchmarks" / task / "baseline.yaml"),
                str(ROOT / "benchmarks" / task / recipe),
                str(short),
            ]
            # one compiler at a time, in the process itself, so that its seconds are all seen
            caches = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            for state, figures in found.items():
                told = subprocess.run(
                    [sys.executable, __file__, "--one", *paths],
                    env={**os.environ, **caches, "OMP_NUM_THREADS": "1"},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                figures.append(json.loads(told.stdout.splitlines()[-1]))
                print(f"pair {pair + 1} of {pairs}, {state} cache: {figures[-1]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="gpt")
    parser.add_argument("--recipe", default="recipes/compile.yaml", help="below the task's folder")
    parser.add_argument("--pairs", type=int, default=3, help="of processes: with an empty cache and with a filled one")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    from benchmarks.machine import described, publish

    found = measured(options.task, options.recipe, options.pairs)
    medians: dict[str, Any] = {
        state: {name: median(run[name] for run in runs) for name in runs[0]} for state, runs in found.items()
    }
    settings = {"task": options.task, "recipe": options.recipe}
    publish(
        {"benchmark": "compile_time", **settings, "median": medians, "runs": found, "machine": described()}, options.out
    )


if __name__ == "__main__":
    main()
