"""Under ``fast_dev_run=True`` what a run is too short for is no error: one batch trains, as in plain Lightning."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff import BatchSizeWarmup, DataPruning
from tests.models import flat, loader, module


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataPruning(),
        lambda: BatchSizeWarmup(1, 0.5, full=4),
        lambda: BatchSizeWarmup(2, 0.5, full=4),
        lambda: BatchSizeWarmup(1, 0.5, full=4, by="batch"),
    ],
)
def test_one_batch_trains(make: Callable[[], Any]) -> None:
    moved = []
    for callbacks in ([], [make()]):
        pl.seed_everything(1, verbose=False)
        net = module("classifier")
        before = flat(net).clone()
        t = pl.Trainer(
            accelerator="cpu",
            fast_dev_run=True,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        t.fit(net, loader("classifier"))
        assert t.global_step == 1 and not torch.equal(flat(net), before)
        moved.append(flat(net))
    assert moved[0].shape == moved[1].shape
