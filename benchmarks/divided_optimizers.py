"""Step time and memory of matrix optimizers on sharded parameters: divided over ranks, or everything on every rank.

    python -m benchmarks.divided_optimizers [--width 256] [--blocks 6] [--rounds 7] [--ranks 2 4] [--out FILE]

Gloo processes on CPU with one thread each hold the matrices of a GPT in pieces of their rows, as FSDP2 does. The arms take
turns in one run, in an order that changes:

- divided: the optimizer on the DTensors.
- gathered: every rank gathers all gradients, and steps whole matrices with the same optimizer. Muon did so before it divided
  matrices, with momenta in the place of gradients.

A turn has as many steps as lie between two refreshes of the bases or roots. A step's processor time is the sum over all ranks,
since more ranks than cores run here. Memory is that of the optimizer's state on each rank. Bytes are sent by all ranks,
and count as in a ring in the gathered arm.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.machine import described, publish
from lightning_eff import SOAP, Muon, Shampoo
from lightning_eff.optim.optimizers._division.shards import local

TURN = 10  # steps
RULES: dict[str, Callable[..., Any]] = {
    "Muon": lambda params, **more: Muon(params, 0.01, dtype="float32", **more),
    "SOAP": lambda params, **more: SOAP(params, 0.01, refresh_steps=10, **more),
    "Shampoo": lambda params, **more: Shampoo(params, 0.01, root_steps=10, **more),
}


def weights(width: int, blocks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"attn": (width, width), "qkv": (3 * width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return {f"blocks.{i}.{name}.weight": torch.randn(shape) for i in range(blocks) for name, shape in shapes.items()}


class Arm:
    """An optimizer of one kind on the same matrices."""

    def __init__(self, rule: str, mesh: DeviceMesh, args: argparse.Namespace, *, divided: bool) -> None:
        self.divided, self.mesh = divided, mesh
        self.pieces = [(n, nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))) for n, w in self.drawn(args).items()]
        self.wholes = [(n, nn.Parameter(w)) for n, w in self.drawn(args).items()] if not divided else []
        self.optimizer = RULES[rule](self.pieces) if divided else RULES[rule](self.wholes, distributed=False)
        torch.manual_seed(1)
        for _, p in self.pieces:
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, [Shard(0)])
        self.sent = 0.0

    @staticmethod
    def drawn(args: argparse.Namespace) -> dict[str, Tensor]:
        return weights(args.width, args.blocks)

    @torch.no_grad()
    def step(self) -> None:
        if self.divided:
            self.optimizer.step()
            self.sent = self.optimizer.sent_bytes
            return
        self.sent = 0.0
        for (_, piece), (_, whole) in zip(self.pieces, self.wholes, strict=True):
            assert isinstance(piece.grad, DTensor)
            whole.grad = piece.grad.full_tensor()
            self.sent += piece.grad.to_local().nbytes * (self.mesh.size() - 1)
        self.optimizer.step()
        for (_, piece), (_, whole) in zip(self.pieces, self.wholes, strict=True):
            own = distribute_tensor(whole, self.mesh, [Shard(0)], src_data_rank=None).to_local()
            local(piece).copy_(own)

    def state_bytes(self) -> int:
        values = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(local(v).nbytes for v in values)


def every(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure(rule: str, args: argparse.Namespace) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    arms = {name: Arm(rule, mesh, args, divided=name == "divided") for name in ("divided", "gathered")}
    sent = dict.fromkeys(arms, 0.0)
    for name, arm in arms.items():
        arm.step()
        arm.step()
        sent[name] = sum(every(arm.sent))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(args.rounds):
        for name in sorted(arms, reverse=turn % 2 == 1):
            dist.barrier()
            begin = time.process_time()
            for _ in range(TURN):
                arms[name].step()
            seconds[name].append(sum(every(time.process_time() - begin)) / TURN)
    ratios = [a / b for a, b in zip(seconds["divided"], seconds["gathered"], strict=True)]
    return {
        "processor_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "state_bytes": {name: every(arm.state_bytes()) for name, arm in arms.items()},
        "sent_bytes": sent,
    }


def child(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {rule: measure(rule, args) for rule in RULES}
    if dist.get_rank() == 0:
        Path(args.child).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int) -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "benchmarks.divided_optimizers", *sys.argv[1:], "--child", str(out)]
        running = [
            subprocess.Popen(command, env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in running]
        assert not any(codes), codes
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    torch.set_num_threads(1)
    results = {str(ranks): launch(ranks) for ranks in args.ranks}
    settings = {"width": args.width, "blocks": args.blocks, "rounds": args.rounds, "steps_per_turn": TURN}
    publish({"benchmark": "divided_optimizers", "machine": described(), **settings, "ranks": results}, args.out)


if __name__ == "__main__":
    main()
