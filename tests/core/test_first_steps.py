"""What is looked at in a run's first steps: whose loss is whose, what else is mixed, and steps that return None."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from lightning_eff._core.losses import LossNotVisible

TOKENS = torch.randint(2, 40, (32, 9), generator=torch.Generator().manual_seed(0))


def train(module: pl.LightningModule, data: Any, *callbacks: Any, steps: int = 6) -> pl.LightningModule:
    torch.manual_seed(1)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
    )
    trainer.fit(module, DataLoader(data, 8))
    return module


class Tokens(pl.LightningModule):
    """A model of tokens whose head begins at zero, so that all losses are equal at first."""

    def __init__(self, *, time_major: bool, skip: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.time_major, self.skip = time_major, skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        if batch_idx in self.skip:
            return None
        z = self.head(self.table(x))
        if self.time_major:
            z, y = z.transpose(0, 1), y.transpose(0, 1)
        return F.cross_entropy(z.reshape(-1, 40), y.reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 3e-2)


TEXTS = TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:])


@pytest.mark.parametrize("technique", [eff.SelectiveBackprop, eff.OrderedSGD, eff.KSAM, eff.EfficientSAM])
def test_equal_losses_are_looked_at_again(technique: Any) -> None:
    with pytest.raises(LossNotVisible, match="are not in the order of the samples"):
        train(Tokens(time_major=True), TEXTS, technique())
    callback = technique()
    train(Tokens(time_major=False), TEXTS, callback)
    assert callback._scorer.checked is True


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_first_step_decides_nothing() -> None:
    with pytest.raises(LossNotVisible, match="are not in the order of the samples"):
        train(Tokens(time_major=True, skip=(0,)), TEXTS, eff.OrderedSGD(keep=0.5))
    callback = eff.OrderedSGD(keep=0.5)
    train(Tokens(time_major=False, skip=(0,)), TEXTS, callback)
    assert callback._scorer.checked is True


def test_the_model_whose_losses_lie_otherwise_is_named() -> None:
    with pytest.raises(LossNotVisible, match=r"in the training_step of model=Tokens\(\.\.\.\) are not in the order"):
        train(Tokens(time_major=False), TEXTS, eff.RHOLoss(keep=0.5, model=Tokens(time_major=True)))
    with pytest.raises(LossNotVisible, match="in the training_step are not in the order"):
        train(Tokens(time_major=True), TEXTS, eff.RHOLoss(keep=0.5, model=Tokens(time_major=False)))


class Columns(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, kinds, y, _ = batch
        return F.cross_entropy(self.head(torch.cat([numbers, self.table(kinds)], 1)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_part_of_the_inputs_is_mixed_only_where_it_is_named() -> None:
    data = TensorDataset(torch.rand(16, 2), torch.arange(16) % 4, torch.arange(16) % 3, torch.arange(16))
    with pytest.raises(ValueError, match=r"^Mixup: the loss also depends on \[1\] \(8,\) int64, .* Set keys=\[0\]"):
        train(Columns(), data, eff.Mixup(alpha=1.0))
    train(Columns(), data, eff.Mixup(alpha=1.0, keys=[0]))


class Asking(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(batch[0]), batch[1])
        self.log("loss", loss)
        assert self.trainer.training and self.current_epoch >= 0 and self.global_step >= 0
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def test_a_reference_is_in_the_runs_trainer_while_it_is_asked() -> None:
    data = TensorDataset(torch.rand(32, 8), torch.arange(32) % 3)
    for make in (lambda m: eff.DifficultyPacing("loss", reference=m), lambda m: eff.RHOLoss(model=m, keep=0.5)):
        reference = Asking()
        before = dict(vars(reference))
        train(Asking(), data, make(reference))
        assert vars(reference).keys() == before.keys()
        assert reference._trainer is None
