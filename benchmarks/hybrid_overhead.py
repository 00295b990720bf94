"""What the hybrid strategy costs where it divides nothing: steps/s over those of Lightning's DDP on the same work.

    python benchmarks/hybrid_overhead.py [--processes 2] [--pairs 9] [--steps 40] [--out FILE]

Starts the processes itself. The arms alternate in one run of them: DDP, hybrid with shard=False, hybrid with shard=True
(FSDP2), and DDP a second time, which shows what the machine's noise alone makes of two equal arms; each round begins with
another arm, and gives one ratio to DDP for each, and one of processor time a step, which other work on the machine disturbs
less. Prints medians and spread, and with ``--out`` writes them with the machine's fingerprint as JSON.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.gpt.data import StdlibText
from examples.gpt.module import GPT
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy

ARMS = ("ddp", "replicas", "shards", "ddp again")


class Clock(Callback):
    """Seconds from the end of the first steps, which warm up, to the end of the last."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.began, self.seconds, self.steps = warm_up, 0.0, 0.0, 0
        self.cpu_began = self.cpu_seconds = 0.0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        now, cpu = time.perf_counter(), time.process_time()
        if self.steps == self.warm_up:
            self.began, self.cpu_began = now, cpu
        self.seconds, self.cpu_seconds = now - self.began, cpu - self.cpu_began


def steps_per_second(arm: str, args: argparse.Namespace) -> tuple[float, float]:
    """Of rank 0, which every step waits for the others: by the clock, and by its own processor time."""
    seed_everything(0, verbose=False)
    strategy: Any = "ddp" if arm.startswith("ddp") else HybridParallelStrategy(shard=arm == "shards")
    clock = Clock(args.warm_up)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.processes,
        strategy=strategy,
        max_steps=args.warm_up + args.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    model = GPT(dim=args.dim, num_layers=args.layers, num_heads=2, block_size=args.length, num_samples=0)
    trainer.fit(model, StdlibText(block_size=args.length, batch_size=args.batch_size, max_bytes=2_000_000))
    return args.steps / clock.seconds, args.steps / clock.cpu_seconds


def work(args: argparse.Namespace) -> None:
    """In each process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu_rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for pair in range(args.pairs + 1):
        for arm in (*ARMS[pair % len(ARMS) :], *ARMS[: pair % len(ARMS)]):
            rate, cpu_rate = steps_per_second(arm, args)
            if pair:  # the first round warms the processes up
                rates[arm].append(rate)
                cpu_rates[arm].append(cpu_rate)
        if pair and os.environ["RANK"] == "0":
            shown = ", ".join(f"{arm} {rates[arm][-1]:.2f}" for arm in ARMS)
            print(f"round {pair}/{args.pairs}, steps/s: {shown}", flush=True)
    if os.environ["RANK"] != "0":
        return
    result: dict[str, Any] = {"benchmark": "hybrid_overhead"}
    for arm in ARMS[1:]:
        ratios = [ours / ddp for ours, ddp in zip(rates[arm], rates["ddp"], strict=True)]
        result[arm] = {"median_ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        cpu = [ours / ddp for ours, ddp in zip(cpu_rates[arm], cpu_rates["ddp"], strict=True)]
        result[arm]["median_ratio_of_cpu_time"] = statistics.median(cpu)
    result |= {
        "median_steps_per_second": {arm: statistics.median(rates[arm]) for arm in ARMS},
        "rounds": args.pairs,
        "steps": args.steps,
        "processes": args.processes,
        "model": {"dim": args.dim, "layers": args.layers, "length": args.length, "batch_size": args.batch_size},
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def start(args: argparse.Namespace) -> int:
    """Start the processes as torchrun would; returns the number of those that failed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": args.processes, "LOCAL_WORLD_SIZE": args.processes, "GROUP_RANK": 0, "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "benchmark", "OMP_NUM_THREADS": 1}
    processes = []
    for rank in range(args.processes):
        env = {**os.environ, **{k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}}
        out = None if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=out, stderr=out))
    return sum(process.wait() != 0 for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args)
    else:
        sys.exit(start(args))


if __name__ == "__main__":
    main()
