"""Loss against trained parameters: a GPT trained on one half of the standard library, tuned to the other.

    python -m benchmarks.fine_tuning [--steps 250] [--seeds 3] [--out benchmarks/results/fine_tuning.json]
    python -m benchmarks.fine_tuning --page

The files are sorted by path. A GPT of ``examples/gpt`` is trained on the first half of them, and its weights are what each arm
begins from: LoRA, BitFit, PromptTuning, HoulsbyAdapters, and all weights, by equally many steps on the second half's training
files. Each arm has rates of its own, of which the one with the lowest loss on validation files at the first seed is taken; what
is told is the loss on test files, over all seeds, which draw the order of windows and what an adapter begins with.

``--page`` writes the table and the figure of docs/how/fine_tuning.md from the committed results.
"""

import argparse
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_eff as eff
from benchmarks.machine import described, publish
from examples.gpt.data import SPLIT_PERIOD, TEST_FILE, VAL_FILE, ByteWindows, read_bytes, stdlib_files
from examples.gpt.module import GPT

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fine_tuning.json"
PAGE = ROOT / "docs" / "how" / "fine_tuning.md"
FIGURE = ROOT / "docs" / "how" / "fine_tuning.svg"
BEGIN, END = "<!-- tuned -->", "<!-- end of tuned -->"
PROMPTS = 10  # there is room for so many tokens more
#: By name: the technique, and the rates that are tried.
ARMS: dict[str, tuple[Callable[[], list[Callback]], tuple[float, ...]]] = {
    "all weights": (list, (1e-3, 3e-3, 1e-2)),
    "LoRA, rank 4": (lambda: [eff.LoRA(4)], (3e-3, 1e-2, 3e-2, 1e-1)),
    "HoulsbyAdapters, 8 numbers": (lambda: [eff.HoulsbyAdapters(8)], (3e-3, 1e-2, 3e-2, 1e-1)),
    "BitFit": (lambda: [eff.BitFit()], (1e-2, 3e-2, 1e-1, 3e-1)),
    "PromptTuning, 10 prompts": (lambda: [eff.PromptTuning(PROMPTS)], (3e-2, 1e-1, 3e-1, 1.0)),
}


def halves(args: argparse.Namespace) -> tuple[ByteWindows, dict[str, ByteWindows]]:
    """Windows of the first half's files, and of the second's: for training, validation and the test."""
    files = stdlib_files()
    first, second = files[: len(files) // 2], files[len(files) // 2 :]
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for i, file in enumerate(second):
        parts[{VAL_FILE: "val", TEST_FILE: "test"}.get(i % SPLIT_PERIOD, "train")].append(file)
    few = {"train": None, "val": args.windows, "test": args.windows}
    return ByteWindows(b"".join(read_bytes(first, args.max_bytes)), args.length), {
        name: ByteWindows(b"".join(read_bytes(own, args.max_bytes)), args.length, few[name])
        for name, own in parts.items()
    }


def model(args: argparse.Namespace, lr: float) -> GPT:
    return GPT(
        dim=args.dim,
        num_layers=args.layers,
        block_size=args.length + PROMPTS,
        lr=lr,
        warmup_steps=max(1, args.steps // 20),
        num_samples=0,
    )


def train(net: GPT, techniques: list[Callback], data: ByteWindows, steps: int, seed: int) -> int:
    """Train in place; how many numbers it trained."""
    seed_everything(seed, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=techniques,
    )
    trainer.fit(net, DataLoader(data, 16, shuffle=True, drop_last=True))
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


@torch.no_grad()
def loss_on(net: GPT, data: ByteWindows) -> float:
    """Nats per byte."""
    net.eval()
    return statistics.fmean(float(net._loss(batch)) for batch in DataLoader(data, 16, drop_last=True))


def compared(args: argparse.Namespace) -> dict[str, Any]:
    first, second = halves(args)
    seed_everything(0, verbose=False)
    base = model(args, 2e-3)
    train(base, [], first, args.pretraining, 0)
    began: dict[str, Tensor] = {name: p.clone() for name, p in base.state_dict().items()}
    found: dict[str, Any] = {"untuned": loss_on(base, second["test"]), "arms": {}}

    def tuned(name: str, rate: float, seed: int) -> tuple[GPT, int]:
        net = model(args, rate)
        net.load_state_dict(began)
        return net, train(net, ARMS[name][0](), second["train"], args.steps, seed)

    for name, (_, rates) in ARMS.items():
        by_rate: dict[float, tuple[float, float, int]] = {}
        for rate in rates:
            net, trained = tuned(name, rate, 0)
            by_rate[rate] = loss_on(net, second["val"]), loss_on(net, second["test"]), trained
        best = min(by_rate, key=lambda rate: by_rate[rate][0])
        losses = [by_rate[best][1]]
        losses += [loss_on(tuned(name, best, seed)[0], second["test"]) for seed in range(1, args.seeds)]
        found["arms"][name] = {
            "trained": by_rate[best][2],
            "rate": best,
            "validation_by_rate": {str(rate): value[0] for rate, value in by_rate.items()},
            "test": losses,
        }
        print(f"{name:<30} {by_rate[best][2]:>8} {best:<8g} {losses}", flush=True)
    return found


# -- the page


def table(result: dict[str, Any]) -> str:
    """The Markdown between the page's marks."""
    asked = result["settings"]
    lines = [
        BEGIN,
        "",
        "![Test loss against the number of trained parameters](fine_tuning.svg)",
        "",
        f"A byte-level GPT with {asked['layers']} blocks of width {asked['dim']} trained for {asked['pretraining']:,} steps on"
        f" the first half of the standard library's files. Its loss on test files of the second half is {result['untuned']:.3f}"
        f" nats per byte. Each method then trained for {asked['steps']} steps on training files of the second half. The table"
        f" shows the mean and range over {asked['seeds']} seeds. Each learning rate is the best of those in its row, on"
        " validation files at the first seed. `BitFit` trains only the biases of norms here, since the linear layers have none."
        f" Hardware: one thread of a {result['device']}, torch {result['torch']}.",
        "",
        "| | trained parameters | test loss | range | learning rate | tried |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(result["arms"].items(), key=lambda item: -item[1]["trained"]):
        rates = ", ".join(f"{float(rate):g}" for rate in row["validation_by_rate"])
        losses = row["test"]
        lines.append(
            f"| {name} | {row['trained']:,} | {statistics.fmean(losses):.3f} | {min(losses):.3f} to {max(losses):.3f} |"
            f" {row['rate']:g} | {rates} |"
        )
    return "\n".join([*lines, "", END])


def page(text: str, result: dict[str, Any]) -> str:
    """The page's ``text`` with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{table(result)}{rest.partition(END)[2]}"


def svg(result: dict[str, Any]) -> str:
    """Each arm's mean test loss, with its range, against how many numbers it trains, by a scale of tens."""
    arms = sorted(result["arms"].items(), key=lambda item: -item[1]["trained"])
    every = [loss for _, row in arms for loss in row["test"]] + [result["untuned"]]
    low, high = min(every), max(every)
    low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)
    tens = [math.log10(row["trained"]) for _, row in arms]
    least, most = math.floor(min(tens)), math.ceil(max(tens))

    def x(trained: float) -> float:
        return 60 + 500 * (math.log10(trained) - least) / (most - least)

    def y(loss: float) -> float:
        return 30 + 240 * (high - loss) / (high - low)

    text = "Nats a byte on held-out files after tuning, against how many numbers train; lower is better"
    rows = [
        f'<path d="M60 {y(result["untuned"]):.1f}H560" stroke="#9aa0a6" stroke-dasharray="5 4"/>',
        f'<text x="64" y="{y(result["untuned"]) - 5:.1f}" fill="#5f6368">before tuning: {result["untuned"]:.3f}</text>',
        '<path d="M60 30V270H560" fill="none" stroke="#202124"/>',
    ]
    rows += [
        f'<text x="{x(10**ten):.1f}" y="288" text-anchor="middle">{10**ten:,}</text>' for ten in range(least, most + 1)
    ]
    rows += [
        f'<text x="54" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.2f}</text>'
        for tick in (low + (high - low) * share for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    ]
    below = -1.0  # where the last name stands: none stands on another
    for name, row in sorted(arms, key=lambda arm: -statistics.fmean(arm[1]["test"])):
        at, mean = x(row["trained"]), statistics.fmean(row["test"])
        left, below = at > 400, max(y(mean) + 4, below + 15)
        rows += [
            f'<path d="M{at:.1f} {y(max(row["test"])):.1f}V{y(min(row["test"])):.1f}" stroke="#202124" stroke-width="2"/>',
            f'<circle cx="{at:.1f}" cy="{y(mean):.1f}" r="5" fill="#7e57c2"/>',
            f'<text x="{at + (-9 if left else 9):.1f}" y="{below:.1f}"'
            f' text-anchor="{"end" if left else "start"}">{name}</text>',
        ]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 300" width="600" height="300"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#202124" role="img">'
    )
    title, note = f"<title>{text}</title>", f'<text x="10" y="16" fill="#5f6368">{text}</text>'
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="white"/>', note, *rows, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/how/fine_tuning.md from the results")
    parser.add_argument("--pretraining", type=int, default=1500, help="steps on the first half")
    parser.add_argument("--steps", type=int, default=250, help="of each arm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--windows", type=int, default=320, help="of validation, and of the test")
    parser.add_argument("--max-bytes", type=int, default=16_000_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.page:
        result = json.loads(RESULTS.read_text())
        PAGE.write_text(page(PAGE.read_text(), result))
        FIGURE.write_text(svg(result))
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    began = time.process_time()
    result = {
        "benchmark": "fine_tuning",
        **compared(args),
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "page")},
        "processor_seconds": round(time.process_time() - began, 1),
        **described(),
    }
    publish(result, args.out)


if __name__ == "__main__":
    main()
