"""What a head without logits saves: peak memory and time of a step, plain and under ``FusedLinearCrossEntropy``.

    python benchmarks/head_cost.py [--vocabularies 256 8192 131072] [--rounds 5] [--threads N] [--out head_cost.json]

For each vocabulary and each share of positions with a label, arms alternate in one process, each a Trainer fit of the same
masked language model on random tokens: without its head (``rest``: the loss is one of the hidden states), plain, and fused.
A round gives one ratio:

    predicted = t_rest + f (t_plain - t_rest),  f = FLOPs of the fused head / FLOPs of the plain one

where the FLOPs of a step, forward and backward, are counted by torch and the times are medians over the round's steps. What
does not shrink with the positions (the head's gradient itself, and the optimizer's step on it) is in ``t_plain - t_rest``
too, so that a ratio above 1 is what is left of it. Bytes are the most that a step held of what it allocated, as torch's
profiler reports it. Prints a table and JSON with medians and ranges over the rounds.
"""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff as eff
from benchmarks.machine import described, publish
from examples.vit.module import EncoderBlock


class MaskedModel(LightningModule):
    """Blocks between an embedding and a head of ``vocabulary`` classes; without the head where ``rest`` is set."""

    def __init__(self, vocabulary: int, dim: int, layers: int, *, rest: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, dim)  # its size is not what is measured
        self.blocks = nn.Sequential(*(EncoderBlock(dim, dim // 64, 0.0) for _ in range(layers)))
        self.head = nn.Linear(dim, vocabulary) if not rest else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.blocks(self.embed(batch["input_ids"]))
        if self.head is None:
            return hidden.square().mean()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Meter(Callback):
    """Seconds of the steps after the first two, the FLOPs of the last one but one, the peak bytes of the last one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.flops = self.peak_bytes = 0
        self._watch: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.steps:
            self._watch = FlopCounterMode(display=False)
        elif batch_idx == self.steps + 1:
            self._watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        if self._watch is not None:
            self._watch.__enter__()
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        watch, self._watch = self._watch, None
        if watch is None:
            if args[-1] >= 2:
                self.seconds.append(time.perf_counter() - self._began)
            return
        watch.__exit__(None, None, None)
        if isinstance(watch, FlopCounterMode):
            self.flops = watch.get_total_flops()
        else:
            self.peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak(watch)


def _peak(watch: Any) -> int:
    """The most that was held at once of what was allocated inside."""
    held = most = 0
    events = [event for event in watch.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(arm: str, vocabulary: int, share: float, args: argparse.Namespace, seed: int) -> Meter:
    """One short fit."""
    seed_everything(seed, verbose=False)
    steps = args.steps + 2
    shape = (steps + 2, args.batch_size, args.length)
    ids, labels = torch.randint(0, 1024, shape), torch.randint(0, vocabulary, shape)
    labels[torch.rand(shape) >= share] = -100
    labels[..., 0] = 0
    module = MaskedModel(vocabulary, args.dim, args.layers, rest=arm == "rest")
    meter = Meter(steps)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps + 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([eff.FusedLinearCrossEntropy()] if arm == "fused" else []), meter],
    )
    batches = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    return meter


def compare(vocabulary: int, share: float, args: argparse.Namespace) -> dict[str, Any]:
    """All arms of one vocabulary and share, in turn."""
    ratios: list[float] = []
    times: dict[str, list[float]] = {"rest": [], "plain": [], "fused": []}
    met: dict[str, Meter] = {}
    for round_ in range(args.rounds + 1):
        met = {arm: measure(arm, vocabulary, share, args, seed=round_) for arm in times}
        if not round_:  # the first round warms the process up
            continue
        t = {arm: statistics.median(meter.seconds) for arm, meter in met.items()}
        f = (met["fused"].flops - met["rest"].flops) / (met["plain"].flops - met["rest"].flops)
        ratios.append(t["fused"] / (t["rest"] + f * (t["plain"] - t["rest"])))
        for arm, seconds in t.items():
            times[arm].append(seconds)
    return {
        "vocabulary": vocabulary,
        "labelled": share,
        "head_flops_share": (met["fused"].flops - met["rest"].flops) / (met["plain"].flops - met["rest"].flops),
        "step_ms": {arm: _spread([1e3 * s for s in seconds]) for arm, seconds in times.items()},
        "peak_mib": {arm: meter.peak_bytes / 2**20 for arm, meter in met.items()},
        "fused_over_plain": _spread([a / b for a, b in zip(times["fused"], times["plain"], strict=True)]),
        "measured_over_predicted": _spread(ratios),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _result(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The rows so far, with what they were taken on."""
    return {
        "benchmark": "head_cost",
        "rows": rows,
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        **described(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[256, 8192, 131072])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 1.0], help="of positions with a label")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each fit")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, help="torch's, on CPU; fewer than the cores on a shared machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    columns = ("classes", "labelled", "plain, ms", "fused, ms", "plain, MiB", "fused, MiB", "measured / predicted")
    print(" ".join(f"{column:>12}" for column in columns), flush=True)
    for vocabulary in args.vocabularies:
        for share in args.shares:
            row = compare(vocabulary, share, args)
            rows.append(row)
            if args.out:
                args.out.write_text(json.dumps(_result(rows, args), indent=2) + "\n")
            ms, mib, ratio = row["step_ms"], row["peak_mib"], row["measured_over_predicted"]
            told = f"{vocabulary:12,} {share:12.0%} {ms['plain']['median']:12.1f} {ms['fused']['median']:12.1f}"
            told += f" {mib['plain']:12.1f} {mib['fused']:12.1f} {ratio['median']:12.3f}"
            print(f"{told} ({ratio['min']:.3f} - {ratio['max']:.3f})", flush=True)
    publish(_result(rows, args), args.out)


if __name__ == "__main__":
    main()
