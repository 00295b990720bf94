"""Time against FLOPs of techniques with fewer numbers: layers, attention, sparsity, adapters.

    python -m benchmarks.fewer_numbers [--only RigL ...] [--rounds 4] [--steps 4] [--out benchmarks/results/fewer_numbers.json]
    python -m benchmarks.fewer_numbers --page

Two arms take turns in one process, each a short Trainer fit of the same module on the same batches: plain, and under the
technique. Rounds begin with the one and the other by turns (A B, B A, ...). Of a step there are three ratios to the plain one:

* needed: FLOPs of products that the numbers which are not zero need, forward and backward; as many as are done, but for masks.
  A zero weight is counted off its product forward and those backward, at each place that the map is applied to; under 2:4
  sparsity the gradient of all weights is needed, and is not counted off.
* done: FLOPs of products that torch's counter sees computed, and of attention's kernel on CPUs, which it has no formula for.
* time: seconds of the one thread that computes, which other processes do not enter; the median step of each fit.

``--page`` writes the table of docs/fewer_numbers.md from the committed results.
"""

import argparse
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from benchmarks.machine import described, publish
from examples.gpt.module import GPT, VOCAB_SIZE
from examples.vit.module import ViT
from lightning_eff.monitor._counting import _attention, _attention_backward

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fewer_numbers.json"
PAGE = ROOT / "docs" / "fewer_numbers.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


PROMPTS = 8  # there is room for so many tokens more


class ConvNet(LightningModule):
    """Four residual blocks of two convolutions with BatchNorm, on (B, 3, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Kind:
    """A module, its batches, and how many places its maps are applied to in a step."""

    module: Callable[[argparse.Namespace], LightningModule]
    batches: Callable[[argparse.Namespace, int], DataLoader[Any]]
    places: Callable[[argparse.Namespace], int]


def gpt(args: argparse.Namespace) -> LightningModule:
    return GPT(dim=args.dim, num_layers=args.layers, num_heads=4, block_size=args.length + PROMPTS, num_samples=0)


def text(args: argparse.Namespace, steps: int) -> DataLoader[Any]:
    ids = torch.randint(0, VOCAB_SIZE, (steps * args.batch_size, args.length + 1))

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        ids = torch.stack([row[0] for row in rows])
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    return DataLoader(TensorDataset(ids), args.batch_size, collate_fn=collate)


def vit(args: argparse.Namespace) -> LightningModule:
    side = round(args.length**0.5)
    return ViT(image_size=2 * side, patch_size=2, dim=args.dim, num_layers=args.layers, num_heads=4, dropout=0.0)


def images(channels: int, scale: int) -> Callable[[argparse.Namespace, int], DataLoader[Any]]:
    def batches(args: argparse.Namespace, steps: int) -> DataLoader[Any]:
        side, count = scale * round(args.length**0.5), steps * args.batch_size
        pixels, labels = torch.randn(count, channels, side, side), torch.randint(0, 10, (count,))
        return DataLoader(TensorDataset(pixels, labels), args.batch_size)

    return batches


KINDS = {
    "GPT": Kind(gpt, text, lambda args: args.batch_size * args.length),
    "ViT": Kind(vit, images(1, 2), lambda args: args.batch_size * (1 + round(args.length**0.5) ** 2)),
    "ConvNet": Kind(lambda args: ConvNet(args.dim // 2), images(3, 1), lambda args: 0),  # nothing is masked in it
}

MLP = ["blocks.*.mlp.*"]
#: By room: the row, on which module, the technique.
ARMS: dict[str, dict[str, tuple[str, Callable[[], Callback]]]] = {
    "layers": {
        "LowRankLinear, rank an eighth": ("GPT", lambda: eff.LowRankLinear(0.125, min_features=64)),
        "LowRankConv, rank a quarter": ("ConvNet", lambda: eff.LowRankConv(0.25)),
        "ButterflyLinear, 4 blocks": ("GPT", lambda: eff.ButterflyLinear(4, min_features=64)),
        "ApproximateRandomDropout, half": ("GPT", lambda: eff.ApproximateRandomDropout(0.5)),
        "SwapActivation, squared ReLU": ("GPT", lambda: eff.SwapActivation("relu2")),
        "RMSNormalization": ("ViT", eff.RMSNormalization),
        "FusedNorms": ("ViT", eff.FusedNorms),
        "GhostNorm, 2 groups": ("ConvNet", lambda: eff.GhostNorm(4)),
        "SeqNorm": ("ConvNet", eff.SeqNorm),
        "QKNorm": ("ViT", eff.QKNorm),
        "LogitSoftcap": ("GPT", eff.LogitSoftcap),
        "RemoveQKVBias": ("ViT", eff.RemoveQKVBias),
        "NgramEmbedding": ("GPT", eff.NgramEmbedding),
    },
    "attention": {
        "MemoryEfficientAttention, by chunks": ("GPT", lambda: eff.MemoryEfficientAttention(kernel="chunks", chunk=64)),
        "Linformer, rank 32": ("ViT", lambda: eff.Linformer(rank=32)),
        "Fastformer": ("ViT", eff.Fastformer),
        "Performer": ("GPT", eff.Performer),
        "Reformer": ("GPT", lambda: eff.Reformer(buckets=8)),
        "SangerAttention": ("GPT", eff.SangerAttention),
        "A3Attention": ("GPT", eff.A3Attention),
        "ELSAAttention": ("GPT", eff.ELSAAttention),
        "DOTAAttention": ("ViT", eff.DOTAAttention),
    },
    "sparsity": {
        "RigL, 80 % zero": ("GPT", eff.RigL),
        "SET, 80 % zero": ("GPT", eff.SET),
        "SNIP, 80 % zero": ("GPT", eff.SNIP),
        "GraSP, 80 % zero": ("GPT", eff.GraSP),
        "SemiStructuredSparsity, 2:4": ("GPT", eff.SemiStructuredSparsity),
        "SemiStructuredSparsity, 2:4 by tiles": ("GPT", lambda: eff.SemiStructuredSparsity(tiles=True)),
        "BlockSparsity, 80 % zero": ("GPT", lambda: eff.BlockSparsity(start=0.0)),
        "ReSprop, 90 % reused": ("GPT", lambda: eff.ReSprop(warmup=0.0)),
        "EarlyBird, half of heads and neurons": ("GPT", lambda: eff.EarlyBird(window=2, distance=1.0, interval=1)),
    },
    "adapters": {
        "LoRA, rank 8": ("GPT", eff.LoRA),
        "VeRA, rank 256": ("GPT", eff.VeRA),
        "BitFit": ("ViT", eff.BitFit),
        "HoulsbyAdapters, 16 numbers": ("GPT", lambda: eff.HoulsbyAdapters(16)),
        "PromptTuning, 8 prompts": ("GPT", lambda: eff.PromptTuning(PROMPTS)),
        "VisualPromptTuning, 8 in each block": ("ViT", lambda: eff.VisualPromptTuning(PROMPTS)),
        "QuantizedBase, NF4, with LoRA": ("GPT", lambda: eff.QuantizedBase(4, names=MLP)),
    },
}
#: Leaves out products with gradients and not with weights, which zeros of weights do not count.
UNCOUNTED = {"ReSprop, 90 % reused"}
#: What has a row and no figures, and why.
UNMEASURED = {
    "LotteryTickets": ("sparsity", "several trainings, each with masks as `SNIP`'s"),
    "TrainLargeThenCompress": ("sparsity", "dense until late in a training, then with masks as `SNIP`'s"),
    "PrefixTuning": ("adapters", "not yet; its attention reads a few more keys and values"),
    **dict.fromkeys(
        ("EmbeddingShortcuts", "UShapedSkips", "ValueEmbeddings", "ValueResiduals"),
        ("layers", "not yet; sums with earlier tensors of the pass take almost none of a step's FLOPs"),
    ),
    "SparseUpcycling": ("layers", "not yet; a token has as many experts as `choices` says, each a network"),
    "WindowPattern": ("attention", "not yet; its saving grows with the length, and is small at this one"),
    "PreNorm": ("layers", "not yet; one more norm takes almost none of a step's FLOPs"),
    "RemoveBias": ("layers", "not yet; biases take almost none of a step's FLOPs"),
}
WITH = {"QuantizedBase, NF4, with LoRA": eff.LoRA}


def _of_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*args)

    flops._get_raw = True  # pyright: ignore[reportFunctionMemberAccess] -- the counter hands it tensors, not shapes
    return flops


#: What the counter has no formula for; counted as torch counts attention on GPUs.
ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_tensors(_attention),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_tensors(_attention_backward),
}


class Meter(Callback):
    """Each step's seconds of this thread, after ``warm_up`` steps; and the FLOPs of the last of those."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.seconds: list[float] = []
        self.flops = 0
        self._ended = 0.0
        self._counter: FlopCounterMode | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up - 1:
            self._counter = FlopCounterMode(display=False, custom_mapping=ON_CPU)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops, self._counter = self._counter.get_total_flops(), None
        elif args[-1] >= self.warm_up:
            self.seconds.append(time.process_time() - self._ended)
            trainer.should_stop = len(self.seconds) == self.steps
        self._ended = time.process_time()


def measure(kind: Kind, techniques: list[Callback], args: argparse.Namespace, seed: int) -> tuple[Meter, int]:
    """One short fit; its meter, and how many numbers of matrices are zero at its end."""
    seed_everything(seed, verbose=False)
    meter = Meter(args.warm_up, args.steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=10**9,
        max_epochs=10**9,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, meter],
    )
    module = kind.module(args)
    trainer.fit(module, kind.batches(args, args.warm_up + args.steps))
    return meter, sum(int((p == 0).sum()) for p in module.parameters() if p.ndim == 2 and p.is_floating_point())


def compared(name: str, room: str, args: argparse.Namespace) -> dict[str, Any]:
    """The three ratios of one technique, over all rounds; the first warms the process up."""
    on, build = ARMS[room][name]
    kind = KINDS[on]
    each = (
        0 if room != "sparsity" else 4 if name.startswith("SemiStructured") else 6
    )  # FLOPs of a zero weight and place
    ratios: list[float] = []
    times: dict[bool, list[float]] = {False: [], True: []}
    done = needed = 1.0
    for i in range(args.rounds + 1):
        met: dict[bool, Meter] = {}
        zeros: dict[bool, int] = {}
        for plain in (True, False) if i % 2 else (False, True):
            beside = [WITH[name]()] if name in WITH else []
            met[plain], zeros[plain] = measure(kind, [] if plain else [build(), *beside], args, i)
        done = met[False].flops / met[True].flops
        off = each * kind.places(args) * max(zeros[False] - zeros[True], 0)
        needed = (met[False].flops - off) / met[True].flops
        if i:
            seconds = {plain: statistics.median(meter.seconds) for plain, meter in met.items()}
            ratios.append(seconds[False] / seconds[True])
            for plain, value in seconds.items():
                times[plain].append(value)
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return {
        "room": room,
        "on": on,
        "needed": None if name in UNCOUNTED else needed,
        "done": done,
        "plain_ms": 1e3 * statistics.median(times[True]),
        "technique_ms": 1e3 * statistics.median(times[False]),
        "time": {"median": middle, "lower_quartile": lower, "upper_quartile": upper, "rounds": ratios},
    }


# -- the page


def verdict(row: dict[str, Any]) -> str:
    """What the time says beside the FLOPs, in words; within 5 % there is no difference."""
    time_ = row["time"]
    if time_["upper_quartile"] < 0.95:
        return "saves time"
    gone = "" if row["needed"] is None or row["needed"] > 0.95 else ", though a step needs fewer FLOPs"
    if time_["lower_quartile"] > 1.05:
        return f"**costs time**{gone}"
    return f"**no time saved**{gone}"


def committed() -> dict[str, Any] | None:
    """The results, where they were measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else None


def table(result: dict[str, Any] | None) -> str:
    """The Markdown between the page's marks."""
    if result is None:
        return f"{BEGIN}\n\nNot measured yet.\n\n{END}"
    load = max(result["load_average_before_and_after"][0][0], result["load_average_before_and_after"][1][0])
    asked = result["settings"]
    lines = [
        BEGIN,
        "",
        f"Measured on one thread of a {result['device']} with {result['cpus']} cores, torch {result['torch']}, by processor"
        f" time, since the machine was shared (load up to {load:.1f}). Width {asked['dim']}, {asked['layers']} blocks,"
        f" {asked['length']} tokens, {asked['batch_size']} samples; medians (quartiles) of {asked['rounds']} rounds.",
        "",
        "| room | technique | on | FLOPs needed | FLOPs done | time | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["techniques"].items():
        took, needed = row["time"], "–" if row["needed"] is None else f"{row['needed']:.2f}"
        lines.append(
            f"| {row['room']} | {name} | {row['on']} | {needed} | {row['done']:.2f} | {took['median']:.2f}"
            f" ({took['lower_quartile']:.2f} - {took['upper_quartile']:.2f}) | {verdict(row)} |"
        )
    lines += [f"| {room} | {name} | – | – | – | – | not measured: {why} |" for name, (room, why) in UNMEASURED.items()]
    return "\n".join([*lines, "", END])


def page(text: str, result: dict[str, Any] | None) -> str:
    """The page's ``text`` with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{table(result)}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/fewer_numbers.md from the results")
    parser.add_argument("--only", nargs="+", default=[""], help="techniques whose names begin so")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each fit")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=144, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), committed()))
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    load = os.getloadavg()
    found: dict[str, Any] = {}
    for room, arms in ARMS.items():
        for name in arms:
            if name.startswith(tuple(args.only)):
                row = found[name] = compared(name, room, args)
                print(f"{name:<40} {row['needed']} {row['done']:.3f} {row['time']['median']:.3f}", flush=True)
    result = {
        "benchmark": "fewer_numbers",
        "techniques": found,
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "only", "page")},
        "load_average_before_and_after": [load, os.getloadavg()],
        **described(),
    }
    publish(result, args.out)


if __name__ == "__main__":
    main()
