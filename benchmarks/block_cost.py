"""What fewer blocks save: a step's measured time over what the blocks' share of the FLOPs predicts.

    python benchmarks/block_cost.py [--rounds 8] [--steps 5] [--threads N] [--out block_cost.json]

Five arms alternate in one process, each a Trainer fit of the same GPT: without its blocks (``t_rest``), plain
(``t_plain``), under ``ProgressiveStacking`` with a third of the blocks, under ``ProgressiveLayerDropping`` at its final
theta, and under ``StochasticDepth`` with half the blocks kept on average. A round gives one ratio for each technique:

    predicted = t_rest + f (t_plain - t_rest),  f = FLOPs of the blocks that ran / FLOPs of all blocks

where the FLOPs of a step, forward and backward, are counted by torch and the times are medians over the steps of the
round. Dropping draws other blocks at each step, so its steps are held against their own f. Prints a table and JSON,
with the medians over the rounds and their range.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff as eff
from benchmarks.machine import described, publish
from examples.gpt.module import GPT, VOCAB_SIZE


class Bytes(Dataset[dict[str, Tensor]]):
    """Random bytes, made beforehand, so that the loader costs next to nothing."""

    def __init__(self, samples: int, length: int) -> None:
        self.ids = torch.randint(0, VOCAB_SIZE, (samples, length + 1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


class Meter(Callback):
    """Each step's seconds, from the end of the one before, and its blocks that ran; the last warm-up step's FLOPs."""

    def __init__(self, blocks: list[nn.Module], warm_up: int) -> None:
        self.warm_up = warm_up
        self.seconds: list[float] = []
        self.ran: list[int] = []
        self.flops = 0
        self.flops_ran = 0
        self._calls, self._ended = 0, 0.0
        self._counter: FlopCounterMode | None = None
        for block in blocks:
            block.register_forward_pre_hook(self._called)

    def _called(self, *_: Any) -> None:
        self._calls += 1

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._calls = 0
        if batch_idx == self.warm_up - 1:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops, self.flops_ran, self._counter = self._counter.get_total_flops(), self._calls, None
        elif args[-1] >= self.warm_up:
            self.seconds.append(time.perf_counter() - self._ended)
            self.ran.append(self._calls)
        self._ended = time.perf_counter()


def measure(technique: Callable[[], Callback] | None, blocks: int, args: argparse.Namespace, seed: int) -> Meter:
    """One short fit of the GPT with ``blocks`` blocks."""
    seed_everything(seed, verbose=False)
    model = GPT(dim=args.dim, num_layers=max(blocks, 1), num_heads=4, block_size=args.length, num_samples=0)
    if not blocks:
        model.blocks = nn.ModuleList()
    steps = args.warm_up + args.steps
    meter = Meter(list(model.blocks), args.warm_up)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([technique()] if technique else []), meter],
    )
    trainer.fit(model, DataLoader(Bytes(steps * args.batch_size, args.length), args.batch_size))
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each fit")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--threads", type=int, help="torch's, on CPU; fewer than the cores on a shared machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)
    third = max(args.layers // 3, 1)
    arms: dict[str, tuple[Callable[[], Callback] | None, int]] = {
        "rest": (None, 0),
        "plain": (None, args.layers),
        "stacking": (lambda: eff.ProgressiveStacking(stages=[(0.0, third)]), args.layers),
        "dropping": (lambda: eff.ProgressiveLayerDropping(theta_min=args.theta, gamma=1e6), args.layers),
        "depth": (lambda: eff.StochasticDepth(drop=min(args.layers / (args.layers + 1), 0.99)), args.layers),
    }
    ratios: dict[str, list[float]] = {"stacking": [], "dropping": [], "depth": []}
    shares: dict[str, list[float]] = {"stacking": [], "dropping": [], "depth": []}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(args.rounds + 1):
        met = {name: measure(*arm, args, seed=round_) for name, arm in arms.items()}
        if not round_:  # the first round warms the process up
            continue
        t = {name: statistics.median(meter.seconds) for name, meter in met.items()}
        for name in t:
            times[name].append(t[name])
        flops_rest = met["rest"].flops
        flops_block = (met["plain"].flops - flops_rest) / args.layers
        for name in ratios:
            meter = met[name]
            # FLOPs of one block that ran, as counted under the technique, by those of one block of the plain model
            per_block = (meter.flops - flops_rest) / meter.flops_ran / flops_block if meter.flops_ran else 1.0
            f = [ran * per_block / args.layers for ran in meter.ran]
            each = [
                s / (t["rest"] + share * (t["plain"] - t["rest"])) for s, share in zip(meter.seconds, f, strict=True)
            ]
            ratios[name].append(statistics.median(each))
            shares[name].append(statistics.mean(f))
        print(f"round {round_}/{args.rounds}: " + ", ".join(f"{n} {r[-1]:.3f}" for n, r in ratios.items()), flush=True)
    print(f"\n{'arm':<10} {'step, ms':>9} {'f of FLOPs':>11} {'measured / predicted':>21} {'range':>15}")
    for name in arms:
        row = f"{name:<10} {1e3 * statistics.median(times[name]):9.1f}"
        if name in ratios:
            r = ratios[name]
            spread = f"{min(r):.3f} - {max(r):.3f}"
            row += f" {statistics.mean(shares[name]):11.3f} {statistics.median(r):21.3f} {spread:>15}"
        print(row)
    result = {
        "benchmark": "block_cost",
        "measured_over_predicted": {
            name: {
                "median": statistics.median(r),
                "min": min(r),
                "max": max(r),
                "flops_share": statistics.mean(shares[name]),
            }
            for name, r in ratios.items()
        },
        "step_ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        **described(),
    }
    publish(result, args.out)


if __name__ == "__main__":
    main()
