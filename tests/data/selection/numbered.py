"""Samples that are their own numbers, and a classifier that notes which it was trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.models import trainer

N = 30


class Numbered(Dataset[Any]):
    """Sample i is its number and a label that follows from it."""

    def __init__(self, size: int = N, shift: float = 0.0) -> None:
        self.size, self.shift = size, shift

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle = torch.tensor(float(index))
        return torch.stack([angle + self.shift, angle.sin(), angle.cos()]), torch.tensor(index % 3)


class Net(pl.LightningModule):
    """A classifier with BatchNorm and dropout that notes the samples of each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.head = nn.Linear(5, 3)
        self._seen: list[list[int]] = []  # private, and so not put back after a pass that leaves no trace

    def embedded(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.body(x / N).tanh()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.training:
            self._seen.append(x[:, 0].long().tolist())
        self.log("loss", loss := F.cross_entropy(self.head(self.embedded(x)), y))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def in_two_processes(*scores: str) -> dict[str, Any]:
    """What each process trains on, and the scores that it has, of pruned runs under DDP."""
    from lightning_eff import DataPruning

    found: dict[str, Any] = {}
    for score in scores:
        technique = DataPruning(score, 0.4, epochs=0, clusters=2, balance=1.0)
        net = run(technique, strategy="ddp", devices=2, max_epochs=1, max_steps=-1)
        state = technique.state_dict()
        seen = [i for batch in net._seen for i in batch]
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, (state["sum"].tolist(), state["kept"].tolist(), seen))
        found[score] = every
    return found


def run(
    callbacks: Callback | Sequence[Callback],
    data: Any = None,
    *,
    resume: Path | None = None,
    net: Any = None,
    **kwargs: Any,
) -> Any:
    """A fit of 24 steps on shuffled batches of 4."""
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = Net() if net is None else net
    several = [callbacks] if isinstance(callbacks, Callback) else callbacks
    data = DataLoader(Numbered(), 4, shuffle=True) if data is None else data
    trainer(*several, **{"max_steps": 24, **kwargs}).fit(net, data, ckpt_path=resume)
    return net
