"""What fewer tokens, smaller images and growing networks save: a step's measured time over what its FLOPs predict.

    python benchmarks/token_cost.py [--only RandomLTD ...] [--rounds 7] [--steps 6] [--threads N] [--out token_cost.json]

Two arms take turns in one process, each a Trainer fit of the same module on the same batches: plain, and under the technique.
Rounds begin with the one and the other by turns (A B, B A, ...). A round gives one ratio:

    predicted = t_plain * FLOPs of a step under the technique / FLOPs of a plain step,    ratio = t_technique / predicted

where the FLOPs of a step, forward and backward, are counted by torch, and the times are medians over the steps of the fit.
What is not counted (norms, activations, the loss, the optimizer, Lightning itself) does not fall with the tokens, or not as
much: that, and what choosing tokens costs, makes the ratio more than 1. Prints a table and JSON, with the medians over the
rounds, their quartiles and their range.
"""

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff as eff
from benchmarks.machine import described, publish
from examples.gpt.module import GPT, VOCAB_SIZE
from examples.vit.module import ViT


@dataclass(frozen=True)
class Arm:
    """A technique, the module that it is tried on, and its batches."""

    technique: Callable[[], Callback]
    module: Callable[[argparse.Namespace], LightningModule]
    batches: Callable[[argparse.Namespace, int], DataLoader[Any]]


def gpt(args: argparse.Namespace) -> LightningModule:
    return GPT(dim=args.dim, num_layers=args.layers, num_heads=4, block_size=args.length, num_samples=0)


def text(args: argparse.Namespace, steps: int) -> DataLoader[Any]:
    ids = torch.randint(0, VOCAB_SIZE, (steps * args.batch_size, args.length + 1))

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.stack([row[0] for row in rows])
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    return DataLoader(TensorDataset(ids), args.batch_size, collate_fn=collate)


def padded_text(args: argparse.Namespace, steps: int) -> DataLoader[Any]:
    """Samples of drawn lengths, half of all places padding, with a mask of it; the module ignores labels there."""
    ids = torch.randint(0, VOCAB_SIZE, (steps * args.batch_size, args.length + 1))
    some = torch.randint(1, args.length, (len(ids) // 2, 1))
    lengths = torch.cat([some, args.length - some], dim=1).flatten()

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids, lengths = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        keep = torch.arange(args.length) < lengths.unsqueeze(1)
        labels = ids[:, 1:].masked_fill(~keep, -100)
        return {"input_ids": ids[:, :-1].contiguous(), "attention_mask": keep, "labels": labels}

    return DataLoader(TensorDataset(ids, lengths), args.batch_size, collate_fn=collate)


def vit(args: argparse.Namespace) -> LightningModule:
    side = round(args.length**0.5)  # as many patches as there are tokens of text, or fewer
    return ViT(image_size=4 * side, patch_size=4, dim=args.dim, num_layers=args.layers, num_heads=4, dropout=0.0)


def images(args: argparse.Namespace, steps: int) -> DataLoader[Any]:
    side = 4 * round(args.length**0.5)
    count = steps * args.batch_size
    return DataLoader(TensorDataset(torch.randn(count, 1, side, side), torch.randint(0, 10, (count,))), args.batch_size)


HALF = [(0.0, 0.5), (0.5, 1.0)]

ARMS: dict[str, Arm] = {
    "RandomLTD, half the tokens": Arm(lambda: eff.RandomLTD(start=0.5, until=1.0), gpt, text),
    "SequencePacking, half of it padding": Arm(eff.SequencePacking, gpt, padded_text),
    "PatchDropout, half the patches": Arm(lambda: eff.PatchDropout(ratio=0.5), vit, images),
    "ProgressiveResizing, half the side": Arm(lambda: eff.ProgressiveResizing(until=1.0, hold=1.0), vit, images),
    # of a run so long that its first steps are all at one stage
    "LayerFreezing, half the blocks": Arm(lambda: eff.LayerFreezing(start=0.0, end=1e-9, depth=0.5), gpt, text),
    "GreedyLayerwise, the first block": Arm(lambda: eff.GreedyLayerwise(until=1.0), gpt, text),
    "ShallowToDeep, half the blocks": Arm(lambda: eff.ShallowToDeep(group=4), gpt, text),
    "DropIn, half the blocks": Arm(lambda: eff.DropIn(first=4), gpt, text),
    "ProgressiveStacking, half the blocks": Arm(lambda: eff.ProgressiveStacking(stages=[(0.0, 4)]), gpt, text),
    "StochasticDepth, half the blocks": Arm(lambda: eff.StochasticDepth(drop=8 / 9), gpt, text),
    "CompoundGrowth, half the depth": Arm(lambda: eff.CompoundGrowth(width=None), gpt, text),
    "CompoundGrowth, half the width": Arm(lambda: eff.CompoundGrowth(depth=None), gpt, text),
    "CompoundGrowth, half the length": Arm(lambda: eff.CompoundGrowth(depth=None, width=None, length=HALF), gpt, text),
    "CompoundGrowth, half of all three": Arm(lambda: eff.CompoundGrowth(length=HALF), gpt, text),
}


class Meter(Callback):
    """Each step's seconds, from the end of the one before, after ``warm_up`` of them; and the FLOPs of the last of those.

    After ``steps`` of them the run ends.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.seconds: list[float] = []
        self.flops = 0
        self._ended = 0.0
        self._counter: FlopCounterMode | None = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up - 1:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops, self._counter = self._counter.get_total_flops(), None
        elif args[-1] >= self.warm_up:
            self.seconds.append(time.perf_counter() - self._ended)
            trainer.should_stop = len(self.seconds) == self.steps
        self._ended = time.perf_counter()


def measure(arm: Arm, args: argparse.Namespace, seed: int, *, plain: bool) -> Meter:
    """One short fit, plain or under the technique; of a run so long that schedules stand at its beginning."""
    seed_everything(seed, verbose=False)
    steps = args.warm_up + args.steps
    meter = Meter(args.warm_up, args.steps)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=10**9,
        max_epochs=10**9,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([] if plain else [arm.technique()]), meter],
    )
    trainer.fit(arm.module(args), arm.batches(args, steps))
    return meter


def compared(arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """Measured over predicted step time of one technique, over all rounds; the first warms the process up."""
    times: dict[str, list[float]] = {"plain": [], "technique": []}
    ratios: list[float] = []
    share = 1.0
    for i in range(args.rounds + 1):
        order = ("plain", "technique") if i % 2 else ("technique", "plain")
        met = {name: measure(arm, args, i, plain=name == "plain") for name in order}
        share = met["technique"].flops / met["plain"].flops
        if i:
            seconds = {name: statistics.median(meter.seconds) for name, meter in met.items()}
            for name, value in seconds.items():
                times[name].append(value)
            ratios.append(seconds["technique"] / (share * seconds["plain"]))
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return {
        "flops_share": share,
        "plain_ms": 1e3 * statistics.median(times["plain"]),
        "technique_ms": 1e3 * statistics.median(times["technique"]),
        "measured_over_predicted": {
            **{"median": middle, "lower_quartile": lower, "upper_quartile": upper},
            **{"min": min(ratios), "max": max(ratios), "rounds": ratios},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="techniques whose names begin so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each fit")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, help="torch's, on CPU; fewer than the cores on a shared machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)
    load = os.getloadavg()
    found: dict[str, Any] = {}
    print(f"{'technique':<44} {'FLOPs':>6} {'plain, ms':>10} {'ms':>8} {'measured / predicted':>21} {'quartiles':>15}")
    for name, arm in ARMS.items():
        if not name.startswith(tuple(args.only)):
            continue
        row = found[name] = compared(arm, args)
        ratio = row["measured_over_predicted"]
        spread = f"{ratio['lower_quartile']:.3f} - {ratio['upper_quartile']:.3f}"
        print(
            f"{name:<44} {row['flops_share']:6.3f} {row['plain_ms']:10.1f} {row['technique_ms']:8.1f}"
            f" {ratio['median']:21.3f} {spread:>15}",
            flush=True,
        )
    result = {
        "benchmark": "token_cost",
        "techniques": found,
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "only")},
        "load_average_before_and_after": [load, os.getloadavg()],
        **described(),
    }
    publish(result, args.out)


if __name__ == "__main__":
    main()
