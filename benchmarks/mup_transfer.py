"""Losses of the reference GPT over learning rates, at width 48 and at width 256, with and without ``MuP``.

    python -m benchmarks.mup_transfer [--steps 100] [--out benchmarks/results/mup_transfer.json]
    python -m benchmarks.mup_transfer --arms narrow --rates 0.01 --out FILE      add some runs to a file
    python -m benchmarks.mup_transfer --page

The GPT of ``examples/gpt`` with tied embeddings and heads of width 16, so that a wider model has more heads. Each run has its
own schedule: a short warm-up and a linear decay to zero. Loss is that on validation windows, in nats per byte. One thread.
The wide model without ``MuP`` also has half of the smallest learning rate (``--arms wide --rates 0.000625``), because its best
one would otherwise be at the edge.

``--page`` writes the table of docs/how/is_it_worth_it.md from the committed results.
"""

import argparse
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

import lightning_eff as eff
from benchmarks.machine import described, publish
from examples.gpt.data import StdlibText
from examples.gpt.module import GPT

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mup_transfer.json"
PAGE = ROOT / "docs" / "how" / "is_it_worth_it.md"
BEGIN, END = "<!-- mup transfer -->", "<!-- end of mup transfer -->"
HEAD = 16  # the width of attention heads
ARMS = ("narrow", "wide", "wide, MuP")


def network(width: int, lr: float, args: argparse.Namespace) -> GPT:
    return GPT(
        dim=width,
        num_layers=args.layers,
        num_heads=width // HEAD,
        block_size=args.length,
        lr=lr,
        warmup_steps=args.steps // 10,
        num_samples=0,
    )


def measure(arm: str, lr: float, args: argparse.Namespace) -> float:
    """The validation loss of one run."""
    seed_everything(args.seed, verbose=False)
    data = StdlibText(args.length, args.batch_size, num_eval_windows=args.windows)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[eff.MuP(network(args.narrow, lr, args))] if arm == "wide, MuP" else [],
    )
    module = network(args.narrow if arm == "narrow" else args.wide, lr, args)
    trainer.fit(module, datamodule=data)
    evaluator = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    return float(evaluator.validate(module, datamodule=data, verbose=False)[0]["val_loss"])


# -- the page


def best(losses: dict[str, float]) -> float:
    """The learning rate with the lowest loss."""
    return float(min(losses, key=lambda lr: losses[lr]))


def table(result: dict[str, Any]) -> str:
    """The Markdown between the page's marks."""
    asked, arms = result["settings"], result["losses"]
    names = {
        "narrow": f"width {asked['narrow']}",
        "wide": f"width {asked['wide']}",
        "wide, MuP": f"width {asked['wide']}, `MuP`",
    }
    rates = sorted({lr for row in arms.values() for lr in row}, key=float)
    lines = [
        BEGIN,
        "",
        f"Validation loss in nats per byte of the reference GPT ({asked['layers']} blocks, heads of width {HEAD}, tied"
        f" embeddings) after {asked['steps']} steps of {asked['batch_size']} x {asked['length']} bytes, over AdamW's learning"
        f" rate. One seed; the lowest loss of each row is bold.",
        "",
        f"| | {' | '.join(f'{float(lr):g}' for lr in rates)} |",
        f"|---|{'---|' * len(rates)}",
    ]
    for arm in ARMS:
        lowest = best(arms[arm])
        mark = {lr: "**" if float(lr) == lowest else "" for lr in rates}
        cells = [f"{mark[lr]}{arms[arm][lr]:.3f}{mark[lr]}" if lr in arms[arm] else "–" for lr in rates]
        lines.append(f"| {names[arm]} | {' | '.join(cells)} |")
    at = {arm: best(row) for arm, row in arms.items()}
    here = str(at["narrow"])
    lines += [
        "",
        f"The best learning rate at width {asked['wide']} is {at['wide'] / at['narrow']:.3g} times that at width"
        f" {asked['narrow']} without `MuP`, and {at['wide, MuP'] / at['narrow']:.3g} times with it. At the narrow model's best"
        f" learning rate, {at['narrow']:g}, the wide model reaches {arms['wide'][here]:.3f} without `MuP` and"
        f" {arms['wide, MuP'][here]:.3f} with it.",
    ]
    return "\n".join([*lines, "", END])


def page(text: str, result: dict[str, Any]) -> str:
    """The page's ``text`` with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{table(result)}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/how/is_it_worth_it.md from the results")
    parser.add_argument("--narrow", type=int, default=48)
    parser.add_argument("--wide", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.00125 * 2**i for i in range(6)])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="bytes of a window")
    parser.add_argument("--windows", type=int, default=64, help="validation windows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    began = time.process_time()
    for arm in args.arms:
        for lr in args.rates:
            loss = measure(arm, lr, args)
            print(f"{arm}, {lr:g}: {loss:.4f}, {time.process_time() - began:.0f} s", flush=True)
            save(args, arm, lr, loss)


def save(args: argparse.Namespace, arm: str, lr: float, loss: float) -> None:
    """Add a loss to the file of the results, or print it without a file."""
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "page", "arms", "rates")}
    known = json.loads(args.out.read_text()) if args.out is not None and args.out.is_file() else {}
    if known.get("settings") != settings:
        known = {"losses": {}}
    known["losses"].setdefault(arm, {})[str(lr)] = loss
    rows = {arm: known["losses"].get(arm, {}) for arm in ARMS}
    losses = {arm: dict(sorted(row.items(), key=lambda one: float(one[0]))) for arm, row in rows.items() if row}
    lowest = {arm: best(row) for arm, row in losses.items()}
    publish(
        {"benchmark": "mup_transfer", "losses": losses, "best": lowest, "settings": settings, **described()}, args.out
    )


if __name__ == "__main__":
    main()
