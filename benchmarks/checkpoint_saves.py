"""How long training waits for checkpoints that are folders of pieces, written at once and in the background.

    python -m benchmarks.checkpoint_saves [--width 1024] [--blocks 6] [--steps 12] [--rounds 5] [--out FILE]

Two gloo processes on CPU with one thread each train a network of about 50 million parameters with AdamW under Lightning's
``ModelParallelStrategy`` (FSDP2). In one run, turns of as many steps take place with no save, with Lightning's own save, and
with that of ``AsyncCheckpointIO``, in an order that changes. Times are the larger one of both ranks:

- blocked: the call of ``trainer.save_checkpoint``.
- turn: the save, the steps that follow, and the wait until the folder is complete. What it takes more than a turn without a
  save is the whole cost of one, since the background thread uses the same cores.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import described, publish
from lightning_eff import ExactResume

KINDS = ("none", "now", "background")


class Network(pl.LightningModule):
    """Feed-forward blocks."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for block in self.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Turns(pl.Callback):
    """Measures turns of steps, of which each begins with a save of one kind."""

    def __init__(self, folder: Path, args: argparse.Namespace, resuming: ExactResume) -> None:
        self.folder, self.args, self.resuming = folder, args, resuming
        self.turn = -1  # the first one warms up
        self.found: dict[str, dict[str, list[float]]] = {kind: {"blocked": [], "turn": []} for kind in KINDS}
        self.begun, self.blocked, self.kind = 0.0, 0.0, "background"

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step % self.args.steps:
            return
        if self.begun:
            self.resuming.session._saves._saves.wait()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
            took = torch.tensor([self.blocked, time.perf_counter() - self.begun])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if self.turn >= 0:
                self.found[self.kind]["blocked"].append(float(took[0]))
                self.found[self.kind]["turn"].append(float(took[1]))
            self.turn += 1
            order = KINDS if (self.turn // len(KINDS)) % 2 else KINDS[::-1]
            self.kind = order[self.turn % len(KINDS)]
        path = self.folder / f"{self.kind}.ckpt"
        if trainer.is_global_zero:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        self.begun = time.perf_counter()
        if self.kind == "background":
            trainer.save_checkpoint(path)
        elif self.kind == "now":  # as Lightning's trainer does
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(None)
            ModelParallelStrategy.save_checkpoint(trainer.strategy, checkpoint, path)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            trainer.strategy.barrier()
        self.blocked = time.perf_counter() - self.begun


def child(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, resuming = Network(args.width, args.blocks), ExactResume()
    turns = Turns(Path(args.child).parent, args, resuming)
    steps = args.steps * (2 + len(KINDS) * args.rounds)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1, process_group_backend="gloo"),
        plugins=[AsyncCheckpointIO()],
        callbacks=[resuming, turns],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(torch.randn(4 * args.batch, args.width)), args.batch))
    if dist.get_rank() == 0:
        size = sum(file.stat().st_size for file in (turns.folder / "background.ckpt").iterdir())
        parameters = args.blocks * (8 * args.width**2 + 5 * args.width)
        Path(args.child).write_text(json.dumps({"parameters": parameters, "bytes": size, "seconds": turns.found}))
    dist.barrier()


def launch() -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        common = {
            **os.environ,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "saves",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.checkpoint_saves", *sys.argv[1:], "--child", str(out)]
        running = [
            subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
        ]
        codes = [process.wait() for process in running]
        assert not any(codes), codes
        return json.loads(out.read_text())


def compared(seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Ratios of saves in the background to those at once, round by round."""
    blocked = [a / b for a, b in zip(seconds["background"]["blocked"], seconds["now"]["blocked"], strict=True)]
    more = {
        kind: [a - b for a, b in zip(seconds[kind]["turn"], seconds["none"]["turn"], strict=True)]
        for kind in ("now", "background")
    }
    return {
        "blocked_ratio": statistics.median(blocked),
        "blocked_ratio_range": [min(blocked), max(blocked)],
        "blocked_seconds": {kind: statistics.median(seconds[kind]["blocked"]) for kind in more},
        "turn_seconds": {kind: statistics.median(seconds[kind]["turn"]) for kind in KINDS},
        "whole_cost_seconds": {kind: statistics.median(values) for kind, values in more.items()},
        "whole_cost_range": {kind: [min(values), max(values)] for kind, values in more.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "child")}
    found = launch()
    publish({"settings": settings, **found, **compared(found["seconds"]), "machine": described()}, args.out)


if __name__ == "__main__":
    main()
