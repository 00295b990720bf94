"""Bare parameters and steps of random gradients, that update rules of matrices are held against references with."""

from typing import Any

import torch
from torch import nn


def parameters(shapes: Any, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters of these shapes, the same at each call."""
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)) for shape in shapes]


def train(params: list[nn.Parameter], optimizer: Any, steps: int = 8, seed: int = 7) -> list[nn.Parameter]:
    """Steps along random gradients, the fourth of which does not reach the second parameter."""
    g = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
            if step == 3 and i == 1:
                p.grad = None
        optimizer.step()
    return params
