"""Memory of a training step by category: LoRA and QLoRA against full tuning, on GPT-2 at its published size.

    python -m benchmarks.adapter_memory [--steps 2] [--out benchmarks/results/adapter_memory.json]
    python -m benchmarks.adapter_memory --page

GPT-2 of transformers' own config, with random weights, in float32 under AdamW; each arm is a short fit on random ids. Bytes are
those that ``EfficiencyMonitor`` counts, each category at its largest: exact sizes of tensors, tied ones once. Frozen weights in
few bits are buffers, whose bytes are added to those of the parameters. They do not depend on the machine.

``--page`` writes the table of docs/how/fine_tuning.md from the committed results.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from benchmarks.machine import described, publish

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "adapter_memory.json"
PAGE = ROOT / "docs" / "how" / "fine_tuning.md"
BEGIN, END = "<!-- memory -->", "<!-- end of memory -->"
CATEGORIES = ("weights", "gradients", "optimizer", "activations")
ARMS: dict[str, Callable[[argparse.Namespace], list[Callback]]] = {
    "full tuning": lambda args: [],
    "LoRA": lambda args: [eff.LoRA(args.rank)],
    "QLoRA, NF4": lambda args: [eff.LoRA(args.rank), eff.QuantizedBase(4)],
}


class GPT2(LightningModule):
    """transformers' GPT-2, and AdamW on what trains."""

    def __init__(self, layers: int, heads: int, dim: int, vocabulary: int, length: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=vocabulary, n_positions=length, n_embd=dim, n_layer=layers, n_head=heads)
        config.use_cache = False
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-4)


def measure(techniques: list[Callback], args: argparse.Namespace) -> dict[str, int]:
    """Bytes by category in one short fit, and how many numbers trained."""
    seed_everything(0, verbose=False)
    monitor = eff.EfficiencyMonitor()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, monitor],
    )
    module = GPT2(args.layers, args.heads, args.dim, args.vocabulary, args.positions)
    ids = torch.randint(0, args.vocabulary, (args.steps * args.batch_size, args.length))
    trainer.fit(module, DataLoader(TensorDataset(ids), args.batch_size))
    held = monitor.summary()["memory"]
    buffers = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in module.buffers()}
    return {
        "weights": held["parameters"] + sum(buffers.values()),
        "gradients": held["gradients"],
        "optimizer": held["optimizer"],
        "activations": held["activations"],
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }


# -- the page


def table(result: dict[str, Any]) -> str:
    """The Markdown between the page's marks."""
    asked, arms = result["settings"], result["arms"]
    whole = sum(arms["full tuning"][name] for name in CATEGORIES)
    lines = [
        BEGIN,
        "",
        f"The table shows the peak memory of a step in MiB, measured by `EfficiencyMonitor` (torch {result['torch']}). The"
        f" model is GPT-2 with {asked['layers']} blocks of width {asked['dim']} and random weights, in float32 with AdamW."
        f" Batches have {asked['batch_size']} x {asked['length']} tokens. `LoRA` has rank {asked['rank']} in all linear layers"
        " of the blocks. The embedding, which is tied to the head, stays in float32.",
        "",
        "| | trained parameters | weights | gradients | optimizer | activations | total, relative to full fine-tuning |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in arms.items():
        cells = " | ".join(f"{row[category] / 2**20:,.0f}" for category in CATEGORIES)
        share = sum(row[category] for category in CATEGORIES) / whole
        lines.append(f"| {name} | {row['trained']:,} | {cells} | {share:.2f} |")
    return "\n".join([*lines, "", END])


def page(text: str, result: dict[str, Any]) -> str:
    """The page's ``text`` with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{table(result)}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/how/fine_tuning.md from the results")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
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
        "benchmark": "adapter_memory",
        "arms": {name: measure(build(args), args) for name, build in ARMS.items()},
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "page")},
        **described(),
    }
    publish(result, args.out)


if __name__ == "__main__":
    main()
