"""The training loader keeps plain Lightning's order, tells sample indices, and goes on exactly in mid-epoch."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from lightning_eff._core._run.recording_sampler import RecordingSampler
from lightning_eff._core.loaders import ResumableLoader
from lightning_eff.strategies._hybrid.batches import stage
from tests.core.nop import Nop
from tests.models import trainer


class Noisy(Dataset[Tensor]):
    """Sample i is i, plus an augmentation from each of the three global generators."""

    def __init__(self, noise: bool = True) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())] if self.noise else []
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """A stream without a length, drawn from the global generator."""

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(20):
            yield torch.stack([torch.tensor(float(i)), torch.rand(())]).double()


class Batches:
    """An iterable with a length that is no DataLoader."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((2,), float(i), dtype=torch.float64) for i in torch.randperm(5)])


class Recorder(pl.LightningModule):
    """Records the batches it is given, draws random numbers as dropout would, and trains one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = batch if isinstance(batch, Tensor) else torch.cat([v.flatten() for v in batch.values()])
        self.seen.append(tensors.clone())
        return (self.weight * torch.rand((), dtype=torch.float64)).sum() + self.weight.sum() * tensors.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InBlocks(Sampler[int]):
    """A user's own sampler: the order of blocks from its own epoch, as distributed samplers have it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist())


LOADERS = {
    "shuffle": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "in order": lambda: DataLoader(Noisy(), 4),
    "own generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * 19 + [9.0], 20)),
    "set_epoch": lambda: DataLoader(Noisy(), 4, sampler=InBlocks()),
    "no batch": lambda: DataLoader(Noisy(), batch_size=None, sampler=WeightedRandomSampler([1.0] * 20, 5)),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Noisy(noise=False), 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), 4),
    "two": lambda: {"a": DataLoader(Noisy(), 4, shuffle=True), "b": DataLoader(Noisy(), 6, shuffle=True)},
    "no DataLoader": lambda: Batches(),
}


def run(kind: str, *callbacks: pl.Callback, resume: Path | None = None, **kwargs: Any) -> Recorder:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = Recorder()
    trainer(*callbacks, **{"max_steps": 12, **kwargs}).fit(net, LOADERS[kind](), ckpt_path=resume)
    return net


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_batches_are_plain_lightnings(kind: str) -> None:
    plain, ours = run(kind), run(kind, Nop())
    assert len(plain.seen) == len(ours.seen) == 12
    assert all(torch.equal(a, b) for a, b in zip(plain.seen, ours.seen, strict=True))
    assert torch.equal(plain.weight, ours.weight)


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_resume_sees_the_batches_that_were_to_come(kind: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = run(kind, Nop(), saver, enable_checkpointing=True)
    for step in (2, 5, 6, 9):
        resumed = run(kind, Nop(), resume=tmp_path / f"step={step}.ckpt")
        assert len(resumed.seen) == 12 - step, step
        for i, (a, b) in enumerate(zip(whole.seen[step:], resumed.seen, strict=True)):
            assert torch.equal(a, b), f"from step {step}, batch {i} after it"
        assert torch.equal(whole.weight, resumed.weight)


def test_resume_goes_on_in_loaders_that_are_asked_for_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    """As strategies do that check a batch at setup."""

    class Early(Nop):
        def on_open(self, session: Any) -> None:
            with stage(session.trainer, RunningStage.TRAINING):
                session.trainer.fit_loop.setup_data()

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    whole = run("shuffle", Nop(), saver, enable_checkpointing=True)
    resumed = run("shuffle", Early(), resume=tmp_path / "step=2.ckpt")
    assert len(resumed.seen) == 10 and all(map(torch.equal, whole.seen[2:], resumed.seen))


def test_sample_indices_are_those_of_the_batch() -> None:
    class Indices(Nop):
        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            found.append((session.sample_indices, batch[:, 0].long().tolist()))

    for kind in ("shuffle", "weighted", "workers"):
        found: list[tuple[list[int], list[int]]] = []
        run(kind, Indices())
        assert len(found) == 12
        assert all(indices == samples for indices, samples in found), kind


def test_the_proxy_is_the_loader_for_everyone_else() -> None:
    class Host:
        rank = 0
        started, waits, looks_ahead, reloaded, alone = True, False, False, None, True

        def resume_rng(self) -> None:
            pass

        def check_choice(self, loader: Any) -> None:
            pass

        def consumed(self, loader: Any) -> bool:
            return False

        def gather(self, value: Any) -> list[Any]:
            return [value]

        def batches_ahead(self) -> int:
            return 0

        def epoch_complete(self) -> bool:
            return False

        def begin_iterations(self) -> None:
            wrapped.begin()

    plain = DataLoader(Noisy(), 4, shuffle=True)
    sampler = plain.batch_sampler
    wrapped = ResumableLoader(plain, Host())
    assert len(wrapped) == 5
    assert wrapped.dataset is plain.dataset and wrapped.batch_size == 4
    wrapped.worker_init_fn = print
    assert plain.worker_init_fn is print
    assert isinstance(plain.batch_sampler, RecordingSampler) and plain.batch_sampler.batch_size == 4
    next(iter(wrapped))
    saved = wrapped.state_dict()
    assert saved["ranks"][0]["position"] == 1
    assert wrapped.unwrap() is plain
    assert plain.batch_sampler is sampler
