"""The bytes that a step of the matrix optimizers holds for its own work, counted by torch's operations."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.live_bytes import LiveBytes
from lightning_eff.optim.optimizers.muon import Muon
from lightning_eff.optim.optimizers.soap import SOAP

MIB = 2**20


def transient(optimizer: torch.optim.Optimizer) -> int:
    """The most bytes beside those that lived before and live after, in the second of two steps."""
    optimizer.step()
    with LiveBytes().watching() as live:
        before = live.total
        optimizer.step()
    return live.peak - max(before, live.total)


def matrices(count: int, *shape: int, layout: Any = torch.contiguous_format) -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(shape).contiguous(memory_format=layout)) for _ in range(count)]
    for p in found:
        p.grad = torch.randn_like(p)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(256, 256), (1024, 256), (256, 128, 3, 3)])
def test_muon_holds_a_few_chunks_however_many_matrices_there_are(dtype: Any, shape: tuple[int, ...]) -> None:
    size = 4 * torch.Size(shape).numel()
    found = [
        transient(Muon(matrices(n, *shape), num_iterations=1, dtype=dtype, split=None))
        for n in (8 * MIB // size, 16 * MIB // size)
    ]
    assert found[1] <= 18 * MIB
    assert found[1] <= 1.01 * found[0] + MIB / 4, "twice as many take no more"


def test_soap_holds_a_few_chunks_however_many_matrices_there_are() -> None:
    found = [transient(SOAP(matrices(n, 64, 512), refresh_steps=1, split=None)) for n in (6, 18)]
    assert found[1] <= 20 * MIB
    assert found[1] <= 1.01 * found[0] + MIB / 4, "three times as many take no more"
