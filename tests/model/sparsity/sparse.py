"""What tests of masks share: a callback that counts after each step, and short fits."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff.model.sparsity._masks.masked import Masked
from tests.models import trainer


class Counts(pl.Callback):
    """After each optimizer step: the numbers of each masked weight that are not zero, its mask and its optimizer's state.

    Attributes:
        nonzero: by step, by name.
        masks: likewise.
        weights: likewise.
        leaks: steps after which a masked weight, or a momentum of one, was not zero.
    """

    def __init__(self) -> None:
        self.nonzero: list[dict[str, int]] = []
        self.masks: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []
        self.leaks: list[int] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == len(self.masks):
            return
        technique: Any = next(c for c in trainer.callbacks if isinstance(c, Masked))  # pyright: ignore[reportAttributeAccessIssue]
        named = dict(pl_module.named_parameters())
        self.masks.append({name: mask.clone() for name, mask in technique.masks.items()})
        self.weights.append({name: named[name].detach().clone() for name in technique.masks})
        self.nonzero.append({name: int(named[name].count_nonzero()) for name in technique.masks})
        for name, mask in technique.masks.items():
            held = [named[name].detach()]
            for optimizer in technique.session.optimizers:
                held += [s for s in (optimizer.state.get(named[name]) or {}).values() if isinstance(s, Tensor)]
            if any(bool(t[~mask].any()) for t in held if t.shape == mask.shape):
                self.leaks.append(trainer.global_step)


def fit_on(net: pl.LightningModule, batch: Any, technique: Any, *, steps: int = 4, **settings: Any) -> Counts:
    """Train ``net`` on one batch again and again."""
    counts = Counts()
    data: DataLoader[Any] = DataLoader([batch] * steps * settings.get("accumulate_grad_batches", 1), batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(technique, counts, max_steps=steps, **settings).fit(net, data)
    return counts


def sparsity_of(counts: Counts, step: int = -1) -> float:
    """The share of masked numbers after a step."""
    masks = counts.masks[step].values()
    return 1 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


def flat_mask(masks: dict[str, Tensor]) -> Tensor:
    """All masks in one vector."""
    return torch.cat([m.flatten() for m in masks.values()])
