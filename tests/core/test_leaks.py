"""Labels that reach the loss beside its targets are refused, and those of metrics and ignored entries are not."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from lightning_eff._core.losses import LossNotVisible


class Net(pl.LightningModule):
    def __init__(self, extra: Callable[..., Any], *, zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head, self.table = nn.Linear(6, 5), nn.Linear(5, 4), nn.Embedding(4, 5)
        self.extra = extra
        if zero:
            nn.init.zeros_(self.net.weight)
            nn.init.zeros_(self.net.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.net(x)
        z = self.head(h)
        return F.cross_entropy(z, y) + self.extra(self, h, z, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(module: pl.LightningModule, *callbacks: Any) -> int:
    """The steps that were trained."""
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(16, 6), torch.arange(16) % 4)
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
    )
    trainer.fit(module, DataLoader(data, 8))
    return trainer.global_step


def _pairs(m: Any, h: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return ((h @ h.T) * (y[:, None] == y[None])).mean()


REFUSED: dict[str, Callable[..., Any]] = {
    "mask of pairs": _pairs,
    "embedding": lambda m, h, z, y: F.cosine_similarity(h, m.table(y)).mean(),
    "index": lambda m, h, z, y: (h - m.table.weight[y]).square().mean(),
    "gather": lambda m, h, z, y: z.gather(1, y[:, None]).mean(),
    "counts": lambda m, h, z, y: (z.mean(0) * torch.bincount(y, minlength=4)).sum(),
    "one-hot": lambda m, h, z, y: (z * F.one_hot(y, 4)).sum(),
    "numbers of Python": lambda m, h, z, y: sum(z[i, int(c)] for i, c in enumerate(y.tolist())) / 8,
    "control flow": lambda m, h, z, y: z.mean() if int(y[0]) == 0 else z.square().mean(),
}
ALLOWED: dict[str, Callable[..., Any]] = {
    "accuracy": lambda m, h, z, y: m.log("acc", (z.argmax(1) == y).float().mean()) or 0.0,
    "accuracy as a number": lambda m, h, z, y: 0.0 * len(str((z.argmax(1) == y).float().mean().item())),
    "shape": lambda m, h, z, y: h.square().mean() * len(y) / y.numel(),
    "ignored entries": lambda m, h, z, y: ((y != -100) * h.square().mean(1)).sum() / (y != -100).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_labels_beside_targets_are_refused(name: str) -> None:
    with pytest.raises(LossNotVisible, match=r"^Mixup: the labels \[1\] come into the loss"):
        train(Net(REFUSED[name]), eff.Mixup(alpha=1.0))


@pytest.mark.parametrize("name", ["mask of pairs", "index"])
def test_label_smoothing_refuses_another_loss_on_labels(name: str) -> None:
    with pytest.raises(LossNotVisible, match=r"^LabelSmoothing: the labels \[1\] come into the loss"):
        train(Net(REFUSED[name]), eff.LabelSmoothing())


def test_labels_are_found_where_all_values_are_alike() -> None:
    with pytest.raises(LossNotVisible, match="'mul'"):
        train(Net(_pairs, zero=True), eff.Mixup(alpha=1.0))


@pytest.mark.filterwarnings("ignore:Mixup. training_step compares")
@pytest.mark.parametrize("name", ALLOWED)
def test_labels_that_do_not_reach_the_loss_are_allowed(name: str) -> None:
    assert train(Net(ALLOWED[name]), eff.Mixup(alpha=1.0)) == 3
