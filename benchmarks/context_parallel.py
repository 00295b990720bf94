"""torch's context parallelism on GPUs: the sequence divided over ranks, against one rank that has the whole of it.

    torchrun --nproc-per-node 4 benchmarks/context_parallel.py [--length 32768] [--out FILE]
    python benchmarks/context_parallel.py --tiny      # one process, any machine: the plain arm and the arithmetic alone

``HybridParallelStrategy(context_parallel_size=...)`` divides sequences of an unchanged module inside its blocks only. This
script shows what torch's own functions give, and what a module has to do for them by hand.
``torch.distributed.tensor.experimental.context_parallel`` lets every rank run the model on a part of the
sequence (two pieces, one from either end, so that causal attention is as much work on all) and passes keys and values round.
What is wrong in silence unless the model's code knows of it, and is done here:

- positions are given and divided with the tokens: ``arange(T)`` inside of the model would start at 0 on every rank;
- labels are shifted before the sequence is divided: ``logits[:, :-1]`` against ``labels[:, 1:]`` would lose the tokens at
  every cut, and compare neighbours that are none;
- the loss is a sum over the rank's tokens divided by the number of all, and gradients are summed over ranks;
- the backward pass runs inside of the context too, which an automatically optimized LightningModule's does not;
- no mask is built from positions: Hugging Face's models take a jump in ``position_ids`` for a new document.

Prints loss and gradient against the whole sequence's, tokens/s as a ratio to one rank's (medians of alternating rounds) and
peak memory. A CPU has no flash attention that can be divided, so that ``--tiny`` runs no context-parallel arm and says so.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

CHUNK = 1024  # tokens whose logits are held at once


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) of ``x`` (B, H, T, D) at ``positions`` (1, T)."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[0, :, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Causal attention and a gated MLP, as Llama has them."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 8 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(rotated(q, positions), rotated(k, positions), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A decoder that is told the positions of its tokens."""

    def __init__(self, vocabulary: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def loss(self, ids: Tensor, labels: Tensor, positions: Tensor, count: int) -> Tensor:
        """Sum of cross-entropies over these tokens, divided by ``count``; labels of -100 do not count."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, positions, use_reentrant=False)
        x, labels = self.norm(x).flatten(0, 1), labels.flatten()
        total = x.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(x.split(CHUNK), labels.split(CHUNK), strict=True):
            total = total + torch.utils.checkpoint.checkpoint(self._part, part, wanted, use_reentrant=False)
        return total / count

    def _part(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), labels, ignore_index=-100, reduction="sum")


def step(model: Model, batch: dict[str, Tensor], around: AbstractContextManager[Any], summed: bool) -> Tensor:
    """Loss of the whole sequence, with gradients in ``.grad``."""
    model.zero_grad(set_to_none=True)
    count = int((batch["labels"] != -100).sum())
    with around:
        loss = model.loss(**batch, count=count)
        loss.backward()
    loss = loss.detach()
    if summed:
        dist.all_reduce(loss)
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768, help="tokens; divisible by twice the ranks")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="64 tokens, 2 layers of 32, float32, 2 rounds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.length, args.dim, args.layers, args.rounds = 64, 32, 2, 2
    gpu = torch.cuda.is_available()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if not gpu and not args.tiny:
        parser.error("torch's context parallelism needs GPUs; got none. With --tiny the rest runs on a CPU.")
    if args.length % (2 * world):
        parser.error(
            f"--length {args.length}: expected a multiple of {2 * world}, two pieces for each of {world} ranks."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    divided = gpu and world > 1
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",)) if divided else None

    torch.manual_seed(0)
    dtype = torch.bfloat16 if gpu else torch.float32
    model = Model(1024, args.dim, max(args.dim // 128, 2), args.layers).to(device, dtype)
    text = torch.randint(1024, (1, args.length + 1), device=device)
    batch = {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
    batch["positions"] = torch.arange(args.length, device=device)[None]

    def timed(around: AbstractContextManager[Any], summed: bool) -> tuple[float, float, Tensor, list[Tensor]]:
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step(model, batch, around, summed)
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if gpu else 0
        return seconds, peak / 2**20, loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    seconds: dict[str, list[float]] = {"whole": [], "divided": []}
    peaks: dict[str, float] = {}
    report: dict[str, Any] = {"length": args.length, "dim": args.dim, "layers": args.layers, "ranks": world}
    for round_ in range(args.rounds + 1):  # the first warms up
        s, peaks["whole"], loss, grads = timed(nullcontext(), summed=False)
        seconds["whole"] += [s] * (round_ > 0)
        if mesh is None:
            continue
        around = context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1, 1, 1])
        s, peaks["divided"], other, parts = timed(around, summed=True)
        seconds["divided"] += [s] * (round_ > 0)
        norm = sum(float(g.double().square().sum()) for g in grads) ** 0.5
        apart = sum(float((g.double() - h.double()).square().sum()) for g, h in zip(grads, parts, strict=True)) ** 0.5
        report |= {"loss": float(loss), "loss_apart": abs(float(loss - other)), "gradient_apart": apart / norm}
    report |= {"seconds": seconds, "peak_mib": peaks, "torch": torch.__version__, "machine": platform.machine()}
    report["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    if divided:
        ratios = [a / b for a, b in zip(seconds["whole"], seconds["divided"], strict=True)]
        report["speed"] = {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
    else:
        report["divided"] = "not run: one rank" if gpu else "not run: a CPU has no attention that torch can divide"
    if rank == 0:
        print(json.dumps(report, indent=1))
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
