"""Peak memory of a training step with less memory for gradients and optimizer states, on a small GPT-2.

    python -m benchmarks.optimizer_memory [--layers 6] [--out benchmarks/results/optimizer_memory.json]
    python -m benchmarks.optimizer_memory --page

GPT-2 of transformers, with random weights, in float32 under AdamW; each arm is a short fit on random ids. The peak
is that of the third step: all bytes of tensors that live at once, as ``benchmarks/live_bytes.py`` counts them, with weights and
states. It does not depend on the machine. Parts of a step that libraries allocate by themselves are not seen.

``--page`` writes the table of docs/how/less_memory.md from the committed results.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from benchmarks.adapter_memory import GPT2
from benchmarks.live_bytes import WatchPeak, storages
from benchmarks.machine import described, publish

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "optimizer_memory.json"
PAGE = ROOT / "docs" / "how" / "less_memory.md"
BEGIN, END = "<!-- optimizer memory -->", "<!-- end of optimizer memory -->"
STEPS = 3


def replaced(name: str, rank: int, **settings: Any) -> Callback:
    return eff.ReplaceOptimizer(name, lr=0.01, rank=rank, **settings)


ARMS: dict[str, Callable[[argparse.Namespace], list[Callback]]] = {
    "AdamW": lambda args: [],
    "OptimizerInBackward": lambda args: [eff.OptimizerInBackward()],
    "EightBitOptimizer": lambda args: [eff.EightBitOptimizer()],
    "GaLore": lambda args: [replaced("GaLore", args.dim // 4)],
    "GaLore, OptimizerInBackward": lambda args: [replaced("GaLore", args.dim // 4), eff.OptimizerInBackward()],
    "APOLLO": lambda args: [replaced("APOLLO", args.dim // 4)],
    "APOLLO-Mini": lambda args: [replaced("APOLLO", 1, scale_by="tensor", scale=128**0.5)],
    "APOLLO-Mini, OptimizerInBackward": lambda args: [
        replaced("APOLLO", 1, scale_by="tensor", scale=128**0.5),
        eff.OptimizerInBackward(),
    ],
    "LISA, 2 blocks": lambda args: [eff.LISA(2)],
    "LISA, 2 blocks, OptimizerInBackward": lambda args: [eff.LISA(2), eff.OptimizerInBackward()],
}


def measure(techniques: list[Callback], args: argparse.Namespace) -> dict[str, int]:
    """Bytes of optimizer states after a short fit, and at the peak of its last step."""
    seed_everything(0, verbose=False)
    watch = WatchPeak(STEPS - 1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, watch],
    )
    module = GPT2(args.layers, args.heads, args.dim, args.vocabulary, args.positions)
    ids = torch.randint(0, args.vocabulary, (STEPS * args.batch_size, args.length))
    trainer.fit(module, DataLoader(TensorDataset(ids), args.batch_size))
    states = [
        value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
    ]
    held = storages(value for value in states if isinstance(value, Tensor))
    return {"optimizer": sum(held.values()), "peak": sum(watch.at_peak.values())}


# -- the page


def table(result: dict[str, Any]) -> str:
    """The Markdown between the page's marks."""
    asked, arms = result["settings"], result["arms"]
    lines = [
        BEGIN,
        "",
        f"The table shows MiB in a step of GPT-2 with {asked['layers']} blocks of width {asked['dim']} and random weights, in"
        f" float32 with AdamW (torch {result['torch']}). Batches have {asked['batch_size']} x {asked['length']} tokens, so"
        f" activations are small. `GaLore` and `APOLLO` have rank {asked['dim'] // 4}, and act on hidden matrices only.",
        "",
        "| | optimizer states | peak of a step | peak, relative to AdamW |",
        "|---|---|---|---|",
    ]
    for name, row in arms.items():
        sizes = " | ".join(f"{row[part] / 2**20:,.0f}" for part in ("optimizer", "peak"))
        lines.append(f"| {name} | {sizes} | {row['peak'] / arms['AdamW']['peak']:.2f} |")
    return "\n".join([*lines, "", END])


def page(text: str, result: dict[str, Any]) -> str:
    """The page's ``text`` with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{table(result)}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/how/less_memory.md from the results")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    result = {
        "benchmark": "optimizer_memory",
        "arms": {name: measure(build(args), args) for name, build in ARMS.items()},
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "page")},
        **described(),
    }
    publish(result, args.out)


if __name__ == "__main__":
    main()
