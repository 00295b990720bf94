"""Networks that techniques of this folder are tried on, and what they make of them before anything has moved."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff._core._branches.attention import Attention, attentions
from lightning_eff._core._branches.graph import Graph
from lightning_eff._core.technique import Technique
from tests.models import trainer


class Deep(pl.LightningModule):
    """Maps one after the other, without anything in between."""

    def __init__(self, depth: int, dim: int) -> None:
        super().__init__()
        self.maps = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(depth)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.maps(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Convolutions(pl.LightningModule):
    """A convolution, one in groups, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, groups=2)
        self.head = nn.Linear(12, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.two(F.relu(self.one(batch[0]))).mean((2, 3))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def begun(build: Callable[[], Any], batch: Any, technique: Technique, *, seed: int = 0) -> Any:
    """The module after one step at a rate of zero."""
    torch.manual_seed(seed)
    m = build()
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)
    data: DataLoader[Any] = DataLoader([batch], batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(technique, max_steps=1).fit(m, data)
    return m


def attentions_of(m: Any, batch: Any) -> list[Attention]:
    """The attentions of a module."""
    m.log = lambda *args, **kwargs: None
    return attentions(Graph(m.eval().training_step(batch, 0), m))
