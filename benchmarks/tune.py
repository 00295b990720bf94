"""Tune a reference task's baseline: a grid of sizes and rates, each trained on the same budget of seconds.

    python benchmarks/tune.py {gpt,gpt256,vit,bert,bert8k,rings,trained} [--budget 60] [--jobs 2] [--seed 0]
        [--only 0,3] [--out FILE]

The grid is ``benchmarks/<task>/grid.yaml``: a list of points, each merged into ``baseline.yaml``. A point runs in a
process of its own on one torch thread. It times steps (15, after 5 to warm up), lays ``budget / median`` steps out, and
trains them from the start with a plain Lightning Trainer, the module's own warm-up and decay to zero, and one validation
at the end. The seed is one that no evaluation uses, so that what was tuned is not what is reported.

A step's seconds are the processor time of the process, from the end of one step to the end of the next: with one thread
that is what the step takes on a core of its own, however busy the machine is. Wall-clock seconds stand beside it.

Prints a table, the best first, and writes ``benchmarks/results/tuning_<task>.json`` after each point; a point that is in
there with the same settings, seed, budget and versions is not run again. A point that fails is reported and left out.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("gpt", "gpt256", "vit", "bert", "bert8k", "rings", "trained")
WARM_UP_STEPS, TIMED_STEPS = 5, 15
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid upon it, mapping by mapping; both are left as they are."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def settings(task: str, point: dict[str, Any]) -> dict[str, Any]:
    """The whole config of a point of ``grid.yaml``: ``{"model": {...}, "data": {...}}`` are init_args."""
    if unknown := point.keys() - {"model", "data"}:
        raise ValueError(f"{task}/grid.yaml: got a point with {sorted(unknown)}; expected 'model' and 'data' alone.")
    baseline = yaml.safe_load((ROOT / "benchmarks" / task / "baseline.yaml").read_text())
    return merged(baseline, {part: {"init_args": arguments} for part, arguments in point.items()})


def built(config: dict[str, Any], seed: int, max_steps: int, callbacks: list[Any]) -> Any:
    """A LightningCLI whose trainer runs ``max_steps`` steps and validates only after the last one."""
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    trainer = {**config.get("trainer", {}), **QUIET, "max_steps": max_steps, "val_check_interval": max_steps}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({**config, "trainer": trainer, "seed_everything": seed}, file)
        file.flush()
        return LightningCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            trainer_defaults={"callbacks": callbacks},
            run=False,
            args=["--config", file.name],
        )


def run_point(config: dict[str, Any], seed: int, budget: float) -> dict[str, Any]:
    """Time a point's steps, train it for ``budget`` seconds of them, and validate.

    Returns:
        ``metrics`` of the validation, ``steps``, ``step_seconds`` (the median of the timed steps), ``seconds`` (of the
        training as it went), ``wall_seconds``, ``validation_seconds``, ``parameters`` and ``train_loss`` (mean of the
        last tenth of the steps).
    """
    import warnings

    import torch
    from lightning.pytorch import Callback

    class Clock(Callback):
        def __init__(self) -> None:
            self.marks: list[tuple[float, float]] = []
            self.losses: list[float] = []
            self.validation = [0.0, 0.0]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))
            self.marks.append((time.process_time(), time.perf_counter()))

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.validation[0] = time.process_time()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.validation[1] = time.process_time()

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    clock = Clock()
    cli = built(config, seed, WARM_UP_STEPS + TIMED_STEPS, [clock])
    cli.trainer.limit_val_batches = 0
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    marks = [mark[0] for mark in clock.marks[WARM_UP_STEPS - 1 :]]
    step_seconds = statistics.median(b - a for a, b in itertools.pairwise(marks))
    steps = max(1, int(budget / step_seconds))

    clock = Clock()
    cli = built(config, seed, steps, [clock])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    if cli.trainer.global_step != steps:
        raise RuntimeError(
            f"Trained {cli.trainer.global_step} steps, expected {steps}: does the trainer config end it?"
        )
    tail = clock.losses[-max(1, steps // 10) :]
    first, last = clock.marks[0], clock.marks[-1]
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items() if name.startswith("val_")}
    if not all(math.isfinite(value) for value in metrics.values()):
        raise RuntimeError(f"Got {metrics} after {steps} steps: the training diverged.")
    return {
        "metrics": metrics,
        "train_loss": sum(tail) / len(tail),
        "steps": steps,
        "step_seconds": step_seconds,
        "seconds": (last[0] - first[0]) * steps / max(1, steps - 1),
        "wall_seconds": last[1] - first[1],
        "validation_seconds": clock.validation[1] - clock.validation[0],
        "parameters": sum(p.numel() for p in cli.model.parameters()),
    }


def machine() -> dict[str, Any]:
    """What the results depend on beside the settings."""
    from importlib.metadata import version

    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    packages = ("torch", "lightning", "transformers", "scikit-learn")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": 1,
        "os": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def table(results: list[dict[str, Any]], points: list[dict[str, Any]]) -> str:
    """The finished points as Markdown, the best validation loss first; only what differs between points is named."""
    flat = [{f"{k}": v for part in point.values() for k, v in part.items()} for point in points]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    varied = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    metrics = sorted({name for r in results for name in r["metrics"]}, key=lambda name: (name != "val_loss", name))
    rows = [[*varied, "parameters", "steps", "ms a step", "train_loss", *metrics]]
    for r in sorted(results, key=lambda r: r["metrics"]["val_loss"]):
        values = {k: v for part in r["point"].values() for k, v in part.items()}
        numbers = [r["parameters"], r["steps"], f"{1000 * r['step_seconds']:.1f}", f"{r['train_loss']:.4f}"]
        rows.append([*(values.get(k, "") for k in varied), *numbers, *(f"{r['metrics'][m]:.4f}" for m in metrics)])
    text = [[str(cell) for cell in row] for row in rows]
    text.insert(1, ["---"] * len(text[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in text)


class Grid:
    """The points of a task, and the file of those that have finished."""

    def __init__(self, task: str, seed: int, budget: float, out: Path, only: set[int] | None) -> None:
        self.seed, self.budget, self.out = seed, budget, out
        points = yaml.safe_load((ROOT / "benchmarks" / task / "grid.yaml").read_text())["points"]
        self.points = [p for i, p in enumerate(points) if only is None or i in only]
        self.configs = [settings(task, point) for point in self.points]
        self.head = {"task": task, "seed": seed, "budget_seconds": budget, "machine": machine()}
        self.results: list[dict[str, Any]] = []
        if out.exists():
            old = json.loads(out.read_text())
            if all(old.get(key) == value for key, value in self.head.items()):
                self.results = old["results"]

    def left(self) -> list[int]:
        """The points that have no result with the very settings that they have now."""
        done = [r["settings"] for r in self.results]
        return [i for i, config in enumerate(self.configs) if config not in done]

    def add(self, index: int, result: dict[str, Any]) -> None:
        self.results.append({"point": self.points[index], "settings": self.configs[index], **result})
        written = {**self.head, "written": datetime.now(UTC).isoformat(timespec="seconds"), "results": self.results}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.out.with_suffix(".tmp")
        fresh.write_text(json.dumps(written, indent=1) + "\n")
        fresh.replace(self.out)

    def run(self, jobs: int) -> int:
        """Run what is left, ``jobs`` processes at a time; returns how many points failed."""
        waiting, running, failed, begun = self.left(), {}, 0, time.monotonic()
        total, finished, taken = len(waiting), 0, []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        print(
            f"{len(self.points)} points, {len(self.points) - total} of them done before; {jobs} at a time", flush=True
        )
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index = waiting.pop(0)
                    task = json.dumps({"config": self.configs[index], "seed": self.seed, "budget": self.budget})
                    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when the point ends)
                    process = subprocess.Popen(
                        [sys.executable, __file__, "--point", task],
                        stdout=log,
                        stderr=log,
                        text=True,
                        env=environment,
                        cwd=ROOT,
                    )
                    running[process] = (index, log, time.monotonic())
                time.sleep(0.2)
                for process in [p for p in running if p.poll() is not None]:
                    index, log, started = running.pop(process)
                    log.seek(0)
                    lines = log.read().splitlines() or [""]
                    log.close()
                    finished += 1
                    taken.append(time.monotonic() - started)
                    waves = -(-(total - finished) // jobs)
                    end = f"{time.monotonic() - begun:.0f} s so far, about {waves * statistics.mean(taken):.0f} s left"
                    name = json.dumps(self.points[index])
                    if process.returncode:
                        failed += 1
                        print(f"[{finished}/{total}] {name}: failed, {end}", *lines[-8:], sep="\n    ", flush=True)
                    else:
                        result = json.loads(lines[-1])
                        self.add(index, result)
                        print(f"[{finished}/{total}] {name}: {result['metrics']}, {end}", flush=True)
        finally:
            for process in running:  # after an interrupt
                process.kill()
        return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("--budget", type=float, default=60.0, help="training seconds of a point")
    parser.add_argument("--jobs", type=int, default=2, help="points at a time, one thread each")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order; evaluations use 1 and up")
    parser.add_argument("--only", help="indices of points, such as 0,3")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/tuning_<task>.json")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        sys.path.insert(0, str(ROOT))
        point = json.loads(args.point)
        print(json.dumps(run_point(point["config"], point["seed"], point["budget"])))
        return
    if args.task is None:
        parser.error(f"expected a task: {', '.join(TASKS)}")
    out = args.out or ROOT / "benchmarks" / "results" / f"tuning_{args.task}.json"
    only = None if args.only is None else {int(i) for i in args.only.split(",")}
    grid = Grid(args.task, args.seed, args.budget, out, only)
    failed = grid.run(args.jobs)
    shown = [r for r in grid.results if r["settings"] in grid.configs]
    print(table(shown, grid.points))
    print(f"\nwritten to {out}")
    if failed:
        raise SystemExit(f"{failed} points failed; run again to try them once more.")


if __name__ == "__main__":
    main()
