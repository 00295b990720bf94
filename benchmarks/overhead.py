"""What idle techniques cost: steps/s of a Trainer with all of them in neutral settings over plain Lightning's.

    python benchmarks/overhead.py [--pairs 9] [--steps 40]

The two arms alternate, A B A B, in one process; each pair gives one ratio. Prints the median and the spread, and with
``--out`` writes them with the machine's fingerprint as JSON.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from math import inf
from pathlib import Path

import lightning
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff as eff
from examples.gpt.data import StdlibText
from examples.gpt.module import GPT


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
    ]


class Clock(Callback):
    """Seconds from the end of the first steps, which warm up, to the end of the last."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.began, self.seconds, self.steps = warm_up, 0.0, 0.0, 0

    def on_train_batch_end(self, *args: object) -> None:
        self.steps += 1
        now = time.perf_counter()
        if self.steps == self.warm_up:
            self.began = now
        self.seconds = now - self.began


def steps_per_second(techniques: list[Callback], args: argparse.Namespace) -> float:
    seed_everything(0, verbose=False)
    clock = Clock(args.warm_up)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=args.warm_up + args.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, clock],
    )
    model = GPT(dim=args.dim, num_layers=args.layers, num_heads=2, block_size=args.length, num_samples=0)
    trainer.fit(model, StdlibText(block_size=args.length, batch_size=args.batch_size, max_bytes=2_000_000))
    return args.steps / clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    ratios: list[float] = []
    for pair in range(args.pairs + 1):
        plain = steps_per_second([], args)
        ours = steps_per_second(idle(args.layers), args)
        if pair:  # the first pair warms the process up
            ratios.append(ours / plain)
            print(
                f"pair {pair}/{args.pairs}: plain {plain:.2f} steps/s, idle {ours:.2f}, ratio {ratios[-1]:.4f}",
                flush=True,
            )
    result = {
        "benchmark": "overhead",
        "median_ratio": statistics.median(ratios),
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "pairs": args.pairs,
        "steps": args.steps,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
