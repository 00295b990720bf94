"""Torch's block-sparse products on a CPU (MKL), against dense ones: ``python -m benchmarks.block_sparse_cpu [--out FILE]``.

A step of a linear layer is forward and backward, as ``BlockSparsity`` would run it with these products: it gathers the blocks,
whose rows are in a random order, multiplies by the sparse matrix forward and for the gradient of the input, and densely for
the gradient of the weight. Both sides take turns on one thread; times are the process's own CPU seconds. Torch has no such
products in bfloat16.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import described, publish
from lightning_eff.model.sparsity._kernels import blocks
from lightning_eff.model.sparsity._kernels.products import _Product

SIZES = ((1024, 1024, 1024), (1024, 512, 512), (4096, 512, 512), (1024, 1024, 256))  #: tokens, outputs, inputs
SIDES, ZEROS = (16, 32, 64), (0.5, 0.8, 0.9, 0.95)


def multiplied(bsr: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """``x A^T + bias`` by MKL's block-sparse product."""
    y = (bsr @ x.t()).t()
    return y.contiguous() if bias is None else y + bias


def measured(sizes: tuple[int, int, int], sides: int, zeros: float, rounds: int) -> dict[str, Any]:
    """The ratio of a sparse step to a dense one, and their largest difference."""
    (tokens, out, ins), numbers = sizes, torch.Generator().manual_seed(0)
    kept = torch.rand(out // sides, ins // sides, generator=numbers) >= zeros
    order, mask = torch.randperm(out, generator=numbers), torch.zeros(out, ins, dtype=torch.bool)
    mask[order] = kept.repeat_interleave(sides, 0).repeat_interleave(sides, 1)
    places = blocks.places_of(mask, order, (sides, sides))
    x, w, b = (torch.randn(*s, generator=numbers) for s in ((tokens, ins), (out, ins), (out,)))
    given, g = [t.requires_grad_() for t in (x, w * mask, b)], torch.randn(tokens, out, generator=numbers)

    def dense() -> Any:
        return torch.autograd.grad(F.linear(*given), given, g)

    def sparse() -> Any:
        packed = blocks.Blocks(given[1].detach(), places, transposed=False)
        return torch.autograd.grad(_Product.apply(*given, packed, False), given, g)  # pyright: ignore[reportArgumentType]

    difference = max(float((p - q).norm() / q.norm()) for p, q in zip(sparse(), dense(), strict=True))
    assert difference < 1e-5, difference
    times = [(taken(dense), taken(sparse)) for _ in range(rounds)]
    ratios = [b / a for a, b in times]
    middle = [round(1e3 * statistics.median(side), 2) for side in zip(*times, strict=True)]
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {
        "tokens": tokens,
        "outputs": out,
        "inputs": ins,
        "block": sides,
        "zeros": zeros,
        "dense_ms": middle[0],
        "sparse_ms": middle[1],
        "ratio": {name: round(value, 3) for name, value in spread.items()},
    }


def taken(run: Callable[[], Any]) -> float:
    """The process's seconds."""
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    """Measure all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with mock.patch.object(blocks, "multiply", multiplied):
        rows = [measured(*one, given.rounds) for one in product(SIZES, SIDES, ZEROS)]
    publish({"machine": described(), "rounds": given.rounds, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
