"""What gives a run away that learns from validation data: marks of samples, and rehearsals that are blind to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_eff._core.patches import Patches
from lightning_eff.bench.watching import Samples, blind, marks, watch, weights
from lightning_eff.tune.honesty import leaks, peeks
from tests.tune.tasks import Regression, Table


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_marks_are_the_same_for_the_same_samples_alone(dtype: torch.dtype) -> None:
    batch = torch.randint(-9, 10, (64, 3, 40), generator=torch.Generator().manual_seed(0)).clamp(min=0).to(dtype)
    first = marks(batch)
    assert first.shape == (64,) and len(set(first.tolist())) == 64
    order = torch.randperm(64)
    assert torch.equal(marks(batch[order]), first[order]), "whichever batch a sample stands in"
    other = batch.clone()
    other[5, 1, 7] = ~other[5, 1, 7] if dtype is torch.bool else other[5, 1, 7] + 1
    assert (marks(other) != first).nonzero().flatten().tolist() == [5]


def test_large_samples_are_marked_by_some_of_their_numbers() -> None:
    images = torch.randn(8, 3, 224, 224)
    assert len(set(marks(images).tolist())) == 8 and torch.equal(marks(images[2:4]), marks(images)[2:4])


def test_samples_of_both_sets_are_counted_by_their_make() -> None:
    samples, x, ids = Samples(), torch.randn(6, 8), torch.arange(40).view(4, 10)
    samples.trained([x, torch.zeros(6, dtype=torch.long)])
    samples.trained({"ids": ids})
    samples.validated([x[4:], torch.zeros(2, dtype=torch.long)])
    assert samples.overlap() == {"torch.float32 (8,)": [2, 6], "torch.int64 (10,)": [0, 4]}, (
        "labels are alike by chance"
    )


def test_what_data_sets_have_in_common_is_no_fault() -> None:
    assert peeks({"a": [0, 5000]}, {"a": [0, 100]}) is None
    assert peeks({"a": [100, 5000]}, {"a": [0, 500]}) is not None
    assert peeks({"a": [500, 5000]}, {"a": [50, 500]}) is None, "a tenth of the baseline's are in both"
    assert "5000 of 5000 samples" in str(peeks({"a": [5000, 5000]}, {"a": [50, 500]}))
    assert peeks({"new": [0, 100]}, {}) is None and peeks({"new": [50, 100]}, {}) is not None
    assert leaks([1.0, 2.0], [1.0, 2.0]) is None and leaks([], []) is None
    assert "the loss of batch 1 3 instead of 2" in str(leaks([1.0, 2.0], [1.0, 3.0]))


class Several(Table):
    """Several validation loaders, one of them a stream."""

    def val_dataloader(self) -> Any:
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from (torch.full((8,), float(i)) for i in range(5))

        return {"map": super().val_dataloader(), "stream": DataLoader(Stream(), 2)}


def test_a_blind_run_is_validated_on_one_sample_alone() -> None:
    data, patches = Several(), Patches()
    trainer: Any = type("Stub", (), {"datamodule": data})()
    blind(trainer, Regression(), patches)
    loaders = data.val_dataloader()
    (batch,) = list(loaders["map"])
    assert batch[0].shape == (64, 8) and batch[0].unique(dim=0).shape[0] == 1 and batch[1].unique().numel() == 1
    assert loaders["map"].dataset.tensors[0].shape == (64, 8), "what else the data set has is there"
    assert [b.unique().tolist() for b in loaders["stream"]] == [[0.0]] * 3
    patches.restore()
    assert next(iter(data.val_dataloader()["map"]))[0].unique(dim=0).shape[0] == 64


class Own(LightningModule):
    """A module that has loaders of its own and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.seen: list[int] = []
        self.data = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch[0].unique(dim=0)))
        self(batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(self.data, range(32)), 8)

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(self.data, range(32, 48)), 16)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watched(Callback):
    """Watches as the pacer does, and may call the module on validation data in training."""

    def __init__(self, *, peek: bool) -> None:
        self.samples, self.patches, self.peek = Samples(), Patches(), peek

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        watch(trainer, pl_module, self.samples, self.patches)
        if not self.peek:
            blind(trainer, pl_module, self.patches)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if self.peek:
            loader: Any = trainer.val_dataloaders
            pl_module(next(iter(loader))[0])

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, *rest: Any) -> None:
        self.samples.validated(batch)


@pytest.mark.parametrize("peek", [False, True])
def test_what_the_module_is_given_in_training_is_seen_and_in_validation_is_not(peek: bool, tmp_path: Path) -> None:
    module, watched = Own(), Watched(peek=peek)
    before = weights(module)
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(max_epochs=1, accelerator="cpu", callbacks=watched, default_root_dir=tmp_path, **off).fit(module)
    found = watched.samples.overlap()["torch.float32 (8,)"]
    assert found == ([64, 128] if peek else [0, 64]), "the step's batch is the module's, too"
    assert module.seen[-1] == (16 if peek else 1), "loaders of the module's own are blinded, too"
    assert weights(module) != before
    watched.patches.restore()
    assert "forward" not in vars(module) and "training_step" not in vars(module)
