"""What a network that is smaller for a while saves: a step's measured time over what its FLOPs predict.

    python benchmarks/block_cost.py [--rounds 8] [--steps 5] [--threads N] [--only NAME ...] [--out block_cost.json]

Fits of the same GPT alternate in one process: without its blocks (``t_rest``), plain (``t_plain``), and under each technique
that grows, drops or freezes, held at half its size: half the blocks, half the hidden units, half the length, half of the
blocks frozen or, for ``GreedyLayerwise``, all but the first. A round gives one ratio for each technique:

    predicted = t_rest + f (t_plain - t_rest),  f = (FLOPs - FLOPs_rest) / (FLOPs_plain - FLOPs_rest)

where FLOPs are those of a step, forward and backward, counted by torch in a fit of its own with the same draws, step by
step, and the times are medians over the steps of the round; on a CPU and one thread they are of the processor, so that
what else runs on the machine does not stand in them. Each step is held against its own f, since dropping draws
other blocks at each. ``AutoProg`` cuts sequences to half, so that the rest of the network has half the tokens, too: it is
held against the network with and without its blocks on sequences of half the length. Prints a table and JSON, with the
medians over the rounds and their range.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
    """Each step's seconds, from the end of the one before, or its FLOPs; it ends the fit after ``warm_up + steps`` steps."""

    def __init__(self, warm_up: int, steps: int, *, count: bool) -> None:
        self.warm_up, self.steps, self.count = warm_up, steps, count
        alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
        self._clock = time.process_time if alone else time.perf_counter
        self.of_step: list[float] = []
        self._begun = 0.0
        self._counter: FlopCounterMode | None = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.count:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        done = args[-1] + 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        value = self._clock() - self._begun
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            value, self._counter = float(self._counter.get_total_flops()), None
        if done > self.warm_up:
            self.of_step.append(value)
        trainer.should_stop = done >= self.warm_up + self.steps
        self._begun = self._clock()


class Arm(NamedTuple):
    """A technique, the network that it is put on, and the two fits that its prediction is made from."""

    technique: Callable[[], Callback] | None = None
    blocks: bool = True
    length: float = 1.0  # of the sequences that the network is given
    rest: str = "rest"
    plain: str = "plain"


def arms_of(args: argparse.Namespace) -> dict[str, Arm]:
    """The references, at full and at half length, and every technique at half its size, as the budget has just begun."""
    half = args.layers // 2
    later = 0.99  # of a budget of which a fit sees next to nothing
    grown = [(0.0, 0.5), (later, 1.0)]
    rest, plain = "rest, half length", "plain, half length"
    techniques: dict[str, Arm] = {
        "ProgressiveStacking": Arm(lambda: eff.ProgressiveStacking(stages=[(0.0, half), (later, args.layers)])),
        "ShallowToDeep": Arm(lambda: eff.ShallowToDeep(group=half, until=later)),
        "DropIn": Arm(lambda: eff.DropIn(first=half, start=later, end=1.0)),
        "CompoundGrowth, depth": Arm(lambda: eff.CompoundGrowth(depth=grown, width=None)),
        "CompoundGrowth, width": Arm(lambda: eff.CompoundGrowth(depth=None, width=grown)),
        "CompoundGrowth, length": Arm(lambda: eff.CompoundGrowth(depth=None, width=None, length=grown)),
        "CompoundGrowth": Arm(lambda: eff.CompoundGrowth(depth=grown, width=grown, length=grown)),
        "AutoProg": Arm(
            lambda: eff.AutoProg(num_stages=2, until=later, search=0.0, inputs="sequences"), rest=rest, plain=plain
        ),
        "GreedyLayerwise": Arm(lambda: eff.GreedyLayerwise(until=1.0)),
        "LayerFreezing": Arm(lambda: eff.LayerFreezing(start=0.0, end=1e-9, depth=0.5)),
        "ProgressiveLayerDropping": Arm(lambda: eff.ProgressiveLayerDropping(theta_min=args.theta, gamma=1e12)),
        "StochasticDepth": Arm(lambda: eff.StochasticDepth(drop=min(args.layers / (args.layers + 1), 0.99))),
    }
    if args.only:
        techniques = {name: arm for name, arm in techniques.items() if name.split(",")[0] in args.only}
    references = {"rest": Arm(blocks=False), "plain": Arm()}
    if any(arm.rest != "rest" for arm in techniques.values()):
        references[rest] = Arm(blocks=False, length=0.5)
        references[plain] = Arm(length=0.5)
    return references | techniques


def measure(arm: Arm, args: argparse.Namespace, seed: int, *, count: bool) -> list[float]:
    """One short fit: the seconds, or the FLOPs, of each step behind the warm-up."""
    seed_everything(seed, verbose=False)
    model = GPT(dim=args.dim, num_layers=args.layers, num_heads=4, block_size=args.length, num_samples=0)
    if not arm.blocks:
        model.blocks = nn.ModuleList()
    steps = args.warm_up + args.steps
    meter = Meter(args.warm_up, args.steps, count=count)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=10**6,  # the budget, of which a technique sees the beginning
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([arm.technique()] if arm.technique else []), meter],
    )
    data = Bytes(steps * args.batch_size, round(args.length * arm.length))
    trainer.fit(model, DataLoader(data, args.batch_size))
    if len(meter.of_step) != args.steps:
        raise RuntimeError(f"{len(meter.of_step)} of {args.steps} steps were run.")
    return meter.of_step


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
    parser.add_argument("--only", nargs="+", metavar="NAME", help="techniques, by their classes' names")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.layers % 2 or args.length % 2:
        parser.error(
            f"got --layers {args.layers} and --length {args.length}; expected even numbers, which have halves."
        )
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)
    arms = arms_of(args)
    named = [name for name, arm in arms.items() if arm.technique]
    if not named:
        parser.error(f"--only {' '.join(args.only)}: none of these is measured here.")
    ratios: dict[str, list[float]] = {name: [] for name in named}
    shares: dict[str, list[float]] = {name: [] for name in named}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(args.rounds + 1):
        flops = {name: measure(arm, args, round_, count=True) for name, arm in arms.items()}
        seconds = {name: measure(arm, args, round_, count=False) for name, arm in arms.items()}
        if not round_:  # the first round warms the process up
            continue
        t = {name: statistics.median(values) for name, values in seconds.items()}
        for name in t:
            times[name].append(t[name])
        for name in named:
            rest, plain = arms[name].rest, arms[name].plain
            blocks = flops[plain][0] - flops[rest][0]
            f = [(counted - flops[rest][0]) / blocks for counted in flops[name]]
            each = [s / (t[rest] + share * (t[plain] - t[rest])) for s, share in zip(seconds[name], f, strict=True)]
            ratios[name].append(statistics.median(each))
            shares[name].append(statistics.mean(f))
        print(f"round {round_}/{args.rounds}: " + ", ".join(f"{n} {r[-1]:.3f}" for n, r in ratios.items()), flush=True)
    print(f"\n{'arm':<24} {'step, ms':>9} {'f of FLOPs':>11} {'measured / predicted':>21} {'range':>15}")
    for name in arms:
        row = f"{name:<24} {1e3 * statistics.median(times[name]):9.1f}"
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
