"""Bytes that live at the peak of a training step, by sequence length, with and without context parallelism: counted.

    torchrun --nproc-per-node 2 benchmarks/context_bytes.py [--into benchmarks/results/context_bytes.json]

Each rank trains on one sequence at a time, of the GPT example with four blocks of width 64. With context parallelism the
ranks share the sequence. The largest count of a rank is reported (see `live_bytes.py`), and the largest difference between
losses of the two runs on the same sequences.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff
from benchmarks.live_bytes import WatchPeak
from benchmarks.machine import described
from examples.gpt.module import GPT

LENGTHS = (256, 512, 1024, 2048)


class Losses(Callback):
    """The training losses."""

    def __init__(self) -> None:
        self.found: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(float(outputs["loss"]))


def measure(length: int, context: int) -> tuple[int, list[float]]:
    """Return the largest peak of a rank in bytes, and the losses, of three steps on sequences of ``length`` tokens."""
    seed_everything(1, verbose=False)
    text = torch.randint(256, (3, length + 1))
    samples: list[dict[str, Tensor]] = [{"input_ids": row[:-1], "labels": row[1:]} for row in text]
    peak, losses = WatchPeak(), Losses()
    strategy = lightning_eff.HybridParallelStrategy(shard=False, context_parallel_size=context)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        **quiet,
        accelerator="cpu",
        strategy=strategy,
        devices=dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        max_steps=3,
        use_distributed_sampler=False,
        enable_model_summary=False,
        callbacks=[peak, losses],
    )
    trainer.fit(GPT(dim=64, num_layers=4, block_size=length, num_samples=0), DataLoader(samples, 1))  # type: ignore[arg-type]
    total = torch.tensor(sum(peak.at_peak.values()))
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return int(total), losses.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    ranks, found = int(os.environ["WORLD_SIZE"]), {}
    for length in LENGTHS:
        (whole, losses), (divided, others) = measure(length, 1), measure(length, ranks)
        apart = max(abs(a - b) for a, b in zip(losses, others, strict=True))
        found[str(length)] = {"whole": whole, "divided": divided, "ratio": divided / whole, "losses_apart": apart}
    if dist.get_rank() == 0:
        text = json.dumps(
            {"benchmark": "context_bytes", "ranks": ranks, "bytes": found, "machine": described()}, indent=2
        )
        print(text)
        if args.into:
            args.into.write_text(f"{text}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
