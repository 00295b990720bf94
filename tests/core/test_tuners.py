"""Lightning's BatchSizeFinder and LearningRateFinder beside techniques: their trials are plain, and leave the run as it was."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_eff import ScheduleFree
from tests.cases import CASES, MISSING
from tests.core.nop import Nop
from tests.models import loader, module, trainer
from tests.runs import differences, final_state

# what takes the loader, the optimizer's step or its gradients, and what takes up state as optimizers are made
NAMES = [
    "AdaScale",
    "BatchSizeWarmup",
    "ExponentialMovingAverage",
    "GradientNoiseScale",
    "JointSpar",
    "LearningRateSchedule",
    "LoRA",
    "MFAC",
    "OptimizerOffload",
    "ProgressiveStacking",
    "Rematerialization",
    "ReplaceOptimizer",
    "SampleSubset",
    "SemiStructuredSparsity",
    "ScheduleFree",
    "TokenBudgetBatches",
]
beside = pytest.mark.parametrize("name", [name for name in NAMES if name not in MISSING])


class Data(pl.LightningDataModule):
    """Batches of a size that the finder sets, for validation too, whose loader it asks for while training."""

    def __init__(self, model: str, batch_size: int = 2) -> None:
        super().__init__()
        self.model, self.batch_size = model, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        like = loader(self.model, 24)
        return DataLoader(like.dataset, self.batch_size, shuffle=True, collate_fn=like.collate_fn)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.model, 8, shuffle=False, seed=5)


def fitted(
    model: str, data: Data, folder: Path, *callbacks: pl.Callback, lr: float | None = None
) -> dict[str, torch.Tensor]:
    """What a run of six steps leaves behind, of the weights and of what techniques report."""
    pl.seed_everything(1, verbose=False)
    net = module(model)
    net.lr = net.lr if lr is None else lr
    t = trainer(*callbacks, max_steps=6, limit_val_batches=1, default_root_dir=folder)
    t.fit(net, data)
    told = {f"told/{name}": value for name, value in t.callback_metrics.items() if name.startswith("eff/")}
    return {**final_state(net, t), **{name: value for name, value in told.items() if "seconds" not in name}}


@beside
def test_the_batch_size_finder(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    data, finder = Data(case.model), BatchSizeFinder(max_trials=2, steps_per_trial=2)
    found = fitted(case.model, data, tmp_path, case.active(), finder)
    assert (finder.optimal_batch_size, data.batch_size) == (4, 4)
    assert differences(found, fitted(case.model, Data(case.model, 4), tmp_path, case.active())) == []


@beside
def test_the_learning_rate_finder(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None, update_attr=False)
    found = fitted(case.model, Data(case.model), tmp_path, case.active(), finder)
    assert finder.optimal_lr is not None
    lrs = finder.optimal_lr.results["lr"]
    assert len(lrs) == 4 and lrs == sorted(lrs) and lrs[-1] == pytest.approx(1.0)
    assert differences(found, fitted(case.model, Data(case.model), tmp_path, case.active())) == []


def test_trials_are_plain_and_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def losses(*callbacks: pl.Callback) -> list[float]:
        finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None, update_attr=False)
        fitted("tiny_gpt", Data("tiny_gpt"), tmp_path, *callbacks, finder)
        assert finder.optimal_lr is not None
        return finder.optimal_lr.results["loss"]

    plain = losses()
    with caplog.at_level(logging.INFO):
        assert losses(CASES["JointSpar"].active(), CASES["SampleSubset"].active()) == plain
    assert "tries plain training steps without techniques (JointSpar, SampleSubset)" in caplog.text


def test_the_tuner_by_itself(tmp_path: Path) -> None:
    net, data = module("tiny_gpt"), Data("tiny_gpt")
    t = trainer(Nop(), max_steps=6, limit_val_batches=1, default_root_dir=tmp_path)
    assert Tuner(t).scale_batch_size(net, datamodule=data, max_trials=3, steps_per_trial=1) == 8
    assert Tuner(t).lr_find(net, datamodule=data, num_training=4, early_stop_threshold=None) is not None
    assert "setup_data" not in vars(t.fit_loop) and "process_dataloader" not in vars(t.strategy)
    t.fit(net, data)
    assert t.global_step == 6


def test_several_loaders_are_asked_for_anew(tmp_path: Path) -> None:
    class Two(Data):
        def train_dataloader(self) -> Any:
            return {"a": super().train_dataloader(), "b": super().train_dataloader()}

    class Sums(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[tuple[int, int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append((len(batch["a"]["labels"]), len(batch["b"]["labels"])))
            return self.w * 1.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    net = Sums()
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1)
    trainer(Nop(), finder, max_steps=2, limit_val_batches=1, default_root_dir=tmp_path).fit(net, Two("tiny_gpt"))
    assert net.seen == [(2, 2), (4, 4), (4, 4), (4, 4)]


def test_a_rate_that_was_found_counts_in_the_warm_up_of_schedule_free(tmp_path: Path) -> None:
    """Its peak is what the finder set, also in a run that is resumed without the finder."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "third.ckpt")

    class Sets(LearningRateFinder):
        """Finds 0.25, whatever the losses."""

        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().on_fit_start(trainer, pl_module)
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.25

    def rate_of(technique: pl.Callback, *others: pl.Callback, **resume: Any) -> float:
        t = trainer(technique, *others, max_steps=6, default_root_dir=tmp_path)
        t.fit(module("tiny_gpt"), Data("tiny_gpt"), **resume)
        return float(t.callback_metrics["eff/schedule_free/rate"])

    active = partial(ScheduleFree, momentum=0.8, warmup_steps=3)
    sets = Sets(num_training_steps=3, early_stop_threshold=None, update_attr=False)
    assert rate_of(active(), sets, Saves()) == 0.25
    assert rate_of(active(), ckpt_path=tmp_path / "third.ckpt") == 0.25
