"""What a run's raw weights were, what was validated, and the mean that weight averaging must arrive at."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

State = dict[str, Tensor]


def state_of(net: pl.LightningModule) -> State:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


class Watch(pl.Callback):
    """The raw state after each step, and what is validated: the state then, and the metric."""

    def __init__(self) -> None:
        self.raw: dict[int, State] = {}
        self.training: set[bool] = set()
        self.validated: dict[int, tuple[State, float]] = {}
        self._state: State = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step:  # 0 while the first gradients accumulate
            self.raw[trainer.global_step] = state_of(pl_module)
        self.training |= {m.training for m in pl_module.modules()}

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._state = state_of(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated[trainer.global_step] = (self._state, trainer.callback_metrics["val_loss"].item())


def reference(raw: dict[int, State], steps: Sequence[int]) -> State:
    """The mean over ``steps`` by NumPy in double precision; what is no parameter is left out."""
    return {
        name: torch.from_numpy(np.mean([raw[s][name].double().numpy() for s in steps], axis=0)).to(value.dtype)
        for name, value in raw[steps[-1]].items()
        if value.is_floating_point() and "running" not in name
    }


def differing(got: State, expected: State) -> list[str]:
    assert expected
    return [name for name, value in expected.items() if not torch.equal(got[name], value)]
