"""A plan run as it is printed: the memory that `lightning-eff plan` predicts for each rank beside what the run takes.

    python -m benchmarks.plan_memory [--processes 8] [--only tp=2 --only pp=2] [--out FILE]

Writes a recipe (the GPT example at small size) into a temporary folder, lets `lightning-eff plan` write its best layout as a
config, and starts that many processes, each of which runs `lightning-eff fit --config recipe.yaml --config plan.yaml` on the
CPU with gloo. Nothing of the plan is changed but the accelerator, and the nodes, which are one machine here. The bytes of all
tensors that live during the third step are counted (benchmarks/live_bytes.py), as the run has them.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PARTS = ("weights", "gradients", "optimizer", "activations", "total")


def recipe(folder: Path, *, width: int, layers: int, length: int, batch_size: int, precision: str) -> Path:
    """A recipe of the GPT example, for any trainer."""
    config = {
        "seed_everything": 1,
        "trainer": {
            "max_steps": 4,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "precision": precision,
        },
        "model": {
            "class_path": "examples.gpt.module.GPT",
            "init_args": {"dim": width, "num_layers": layers, "num_heads": 4, "block_size": length, "num_samples": 0},
        },
        "data": {
            "class_path": "examples.gpt.data.StdlibText",
            "init_args": {
                "block_size": length,
                "batch_size": batch_size,
                "max_bytes": 2_000_000,
                "num_eval_windows": 4,
            },
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def plan(folder: Path, config: Path, processes: int, options: Sequence[str]) -> dict[str, Any]:
    """What ``lightning-eff plan`` says, with the config of the best layout in ``plan.yaml`` of the folder."""
    from lightning_eff.cli import main

    printed = io.StringIO()
    arguments = ["--config", str(config), "--gpus", str(processes), "--gpu", "h200", "--timeline", "none", "--quiet"]
    with contextlib.redirect_stdout(printed):
        main(["plan", *arguments, "--out", str(folder / "plan.yaml"), "--json", "-", *options])
    return json.loads(printed.getvalue())


def fit(folder: Path) -> None:
    """In each process: the fit, measured; writes ``rank<N>.json``."""
    import warnings

    import torch

    from benchmarks.live_bytes import Stepped, WatchPeak, parts
    from lightning_eff import cli

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    here = {
        "trainer": {
            "accelerator": "cpu",
            "num_nodes": 1,
            "devices": int(os.environ["WORLD_SIZE"]),
            "callbacks+": [{"class_path": "benchmarks.live_bytes.WatchPeak"}],
        }
    }
    path = folder / f"here{rank}.yaml"
    path.write_text(yaml.safe_dump(here))
    watching: list[WatchPeak] = []
    setup = WatchPeak.setup

    def noted(self: WatchPeak, *args: Any, **kwargs: Any) -> None:
        watching.append(self)
        setup(self, *args, **kwargs)

    WatchPeak.setup = noted
    with Stepped().noting() as stepped:
        cli.main(["fit", *(f"--config={folder / name}" for name in ("recipe.yaml", "plan.yaml", path.name))])
    (folder / f"rank{rank}.json").write_text(json.dumps(parts(watching[0], stepped)))


def run(folder: Path, processes: int, timeout: float) -> list[dict[str, int]]:
    """Start the processes as torchrun would; what each measured.

    Raises:
        RuntimeError: if one fails, with what it printed.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0, "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "plan", "OMP_NUM_THREADS": 1}
    started: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank{rank}.log" for rank in range(processes)]
    for rank, log in enumerate(logs):
        env = {**os.environ, **{k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.plan_memory", "--rank-in", str(folder)]
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=folder))
    try:
        codes = [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        said = "\n".join(f"rank {rank}: {log.read_text()[-1500:]}" for rank, log in enumerate(logs))
        raise RuntimeError(f"plan_memory: exit codes {codes}\n{said}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def compared(planned: dict[str, Any], measured: Sequence[dict[str, int]]) -> list[dict[str, Any]]:
    """For each rank the predicted and the measured bytes; ``activations`` is all that is none of the others."""
    stages = planned["best"][0]["memory_bytes_by_pipeline_rank"]
    rows: list[dict[str, Any]] = []
    for rank, found in enumerate(measured):
        stage = rank * len(stages) // len(measured)  # ranks of one stage are next to one another
        predicted = {name: stages[stage][name] for name in ("weights", "gradients", "optimizer", "total")}
        predicted["gradients"] /= (
            2 if len(stages) > 1 else 1
        )  # the last step's count among the rest, as they are measured
        predicted["activations"] = predicted["total"] - sum(predicted[k] for k in ("weights", "gradients", "optimizer"))
        rows.append({"rank": rank, "pipeline_rank": stage, "predicted": predicted, "measured": found})
    return rows


def experiment(processes: int, options: Sequence[str], timeout: float = 600.0, **sizes: Any) -> dict[str, Any]:
    """Plan, run, compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planned = plan(folder, recipe(folder, **sizes), processes, options)
        if not planned["best"]:
            raise RuntimeError(f"plan_memory: no layout with {list(options)}: {planned['refused']}")
        measured = run(folder, processes, timeout)
        config = yaml.safe_load((folder / "plan.yaml").read_text())
    return {"recipe": sizes, "options": list(options), "config": config, "ranks": compared(planned, measured)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--only", action="append", default=[], help="for lightning-eff plan; replaces the three plans")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_in:
        fit(args.rank_in)
        return
    import lightning
    import torch

    sizes = {"width": 128, "layers": 8, "length": 128, "batch_size": 4}
    chosen = [[word for only in args.only for word in ("--only", only)]] if args.only else [list(o) for o in PLANS]
    result: dict[str, Any] = {"benchmark": "plan_memory", "processes": args.processes, "plans": []}
    for options in chosen:
        found = experiment(args.processes, options, precision="bf16-mixed", **sizes)
        result["plans"].append(found)
        print("\n".join(table(found)), flush=True)
    versions = {"torch": torch.__version__, "lightning": lightning.__version__, "python": platform.python_version()}
    result |= {"device": "cpu, gloo", **versions}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


#: What the plans are held to: one of each kind, since at this size whole copies are always the fastest.
PLANS = (
    ("--only", "pp=2", "--only", "tp=2", "--only", "shard=zero3", "--only", "micro_batch=2", "--only", "schedule=1F1B"),
    ("--only", "pp=4", "--only", "remat=full", "--only", "shard=none", "--only", "micro_batch=1"),
    ("--only", "tp=1", "--only", "pp=1", "--only", "shards=4", "--only", "remat=selective"),
)


def table(found: dict[str, Any]) -> list[str]:
    """Predicted over measured, for people."""
    strategy = found["config"]["trainer"]["strategy"]
    lines = [
        f"{strategy['class_path']} {strategy['init_args']}",
        f"callbacks {found['config']['trainer']['callbacks']}",
    ]
    lines.append("rank  " + "  ".join(f"{name:>22}" for name in PARTS))
    for row in found["ranks"]:
        cells = [f"{row['predicted'][n] / 1e6:9.3f} of {row['measured'][n] / 1e6:9.3f}" for n in PARTS]
        lines.append(f"{row['rank']:>4}  " + "  ".join(f"{cell:>22}" for cell in cells))
    return lines


if __name__ == "__main__":
    main()
