"""Compiled blocks stay compiled, and nothing else is compiled with them, whatever becomes of what they save."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff import ActivationOffload, Rematerialization
from tests.models import trainer

STEPS = 3


class Residual(nn.Module):
    """With ``broken``, dynamo compiles it in two parts, and what is between them runs eagerly."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.broken = broken

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.broken:
            hidden = eager(hidden)
        return x + self.down(hidden)


@torch.compiler.disable(recursive=False)
def eager(x: Tensor) -> Tensor:
    return x.sigmoid().exp()


class Net(pl.LightningModule):
    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(broken) for _ in range(6)])

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(*callbacks: pl.Callback, how: str | None, broken: bool) -> tuple[list[Tensor], dict[str, int]]:
    """The weights after ``STEPS`` steps, and how many operations dynamo took into how many graphs."""
    torch._dynamo.reset()
    counters.clear()
    pl.seed_everything(1, verbose=False)
    net = Net(broken=broken)
    if how == "torch.compile(block)":
        net.blocks = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in net.blocks])  # pyright: ignore[reportArgumentType]
    elif how == "block.compile()":
        for block in net.blocks:
            block.compile(backend="aot_eager")
    data = torch.randn(4 * STEPS, 8, 16, generator=torch.Generator().manual_seed(0))
    trainer(*callbacks, max_steps=STEPS).fit(net, DataLoader(data, batch_size=4))  # pyright: ignore[reportArgumentType]
    return [p.detach().clone() for p in net.parameters()], dict(counters["stats"])


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What dynamo warns of."""
    messages: list[str] = []

    class Keep(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Keep(logging.WARNING), logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    torch._dynamo.reset()
    counters.clear()


TECHNIQUES: dict[str, Callable[[], Any]] = {
    "full": lambda: Rematerialization(policy="full"),
    "sqrt": lambda: Rematerialization(policy="sqrt"),
    "selective": lambda: Rematerialization(policy="selective"),
    "optimal": lambda: Rematerialization(policy="optimal", memory_budget=0.5),
    "offload": lambda: ActivationOffload(min_bytes=64),
    "offload blocks": lambda: ActivationOffload(min_bytes=64, layers="blocks"),
}


@pytest.mark.filterwarnings("ignore")  # torch's compiler, about its own insides
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "graph break"])
@pytest.mark.parametrize("how", ["torch.compile(block)", "block.compile()"])
def test_dynamo_compiles_the_blocks_and_nothing_else(how: str, broken: bool, told: list[str]) -> None:
    weights, _ = run(how=None, broken=broken)
    _, plain = run(how=how, broken=broken)
    assert plain["unique_graphs"] >= 2
    for name, technique in TECHNIQUES.items():
        found, compiled = run(technique(), how=how, broken=broken)
        assert (name, compiled) == (name, plain)
        for expected, got in zip(weights, found, strict=True):
            torch.testing.assert_close(got, expected, msg=lambda m, name=name: f"{name}: {m}")
    assert told == []
