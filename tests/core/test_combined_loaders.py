"""Combined and reloaded training loaders: plain Lightning's batches, exact resume, and the user's loaders back at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.core.nop import Nop
from tests.models import trainer


class Numbered(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([100.0 + i, float(torch.rand(()))]) for i in range(self.count))


def known(count: int) -> DataLoader[Tensor]:
    return DataLoader(Numbered(count), 2, shuffle=True)


def unknown(count: int) -> DataLoader[Tensor]:
    return DataLoader(Stream(count), 2)


def tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch or []
    return [tensor for part in parts if part is not None for tensor in tensors(part)]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        held = torch.cat([tensor.flatten() for tensor in tensors(batch)])
        self.seen.append((batch_idx, held))
        return (self.weight * torch.rand(()) - held.mean()).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(loaders: Any, *callbacks: pl.Callback, resume: Path | None = None, **kwargs: Any) -> Net:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = Net()
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": saves, **kwargs}
    trainer(*callbacks, **options).fit(net, loaders, ckpt_path=resume)
    return net


def check_alike(whole: Net, other: Net, step: int = 0) -> None:
    assert len(other.seen) == len(whole.seen) - step, step
    for (number, batch), (again, found) in zip(whole.seen[step:], other.seen, strict=True):
        assert number == again and torch.equal(batch, found), step
    assert torch.equal(whole.weight, other.weight), step


def check_resumes(make: Callable[[], Any], tmp_path: Path, steps: int | None = None, **kwargs: Any) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(make(), Nop(), saver, **kwargs)
    for step in range(1, steps or len(whole.seen)):
        check_alike(whole, fit(make(), Nop(), resume=tmp_path / f"step={step}.ckpt", **kwargs), step)


COMBINED: dict[str, Callable[[], Any]] = {
    "cycled stream": lambda: CombinedLoader([known(10), unknown(6)], "max_size_cycle"),
    "cycled beside a stream": lambda: CombinedLoader([known(6), unknown(8)], "max_size_cycle"),
    "ended stream": lambda: CombinedLoader([known(8), unknown(4)], "max_size"),
    "ended beside a stream": lambda: CombinedLoader([unknown(8), known(4)], "max_size"),
    "shortest, two streams": lambda: CombinedLoader([unknown(8), unknown(6)], "min_size"),
    "nested": lambda: CombinedLoader({"a": known(4), "b": [unknown(8), known(2)]}, "max_size_cycle"),
    "dict": lambda: {"a": known(4), "b": unknown(8)},
}


@pytest.mark.parametrize("kind", COMBINED)
def test_combined_loaders_resume_with_the_batches_that_were_to_come(kind: str, tmp_path: Path) -> None:
    check_alike(fit(COMBINED[kind]()), fit(COMBINED[kind](), Nop()))
    check_resumes(COMBINED[kind], tmp_path)


def test_limited_combined_loaders_resume(tmp_path: Path) -> None:
    check_resumes(lambda: CombinedLoader([known(4), unknown(8)], "max_size_cycle"), tmp_path, limit_train_batches=3)


def test_one_loader_in_two_places_has_a_place_in_each(tmp_path: Path) -> None:
    def make() -> CombinedLoader:
        loader = known(8)
        return CombinedLoader([loader, loader], "min_size")

    check_alike(fit(make()), fit(make(), Nop()))
    check_resumes(make, tmp_path)


def persistent() -> DataLoader[Tensor]:
    return DataLoader(Numbered(6), 2, shuffle=True, num_workers=1, persistent_workers=True)


RELOADED: dict[str, Callable[[], Any]] = {
    "one": lambda: known(6),
    "persistent workers": persistent,
    "stream": lambda: unknown(6),
    "combined": lambda: CombinedLoader({"a": known(6), "b": known(4)}, "max_size_cycle"),
}


@pytest.mark.parametrize("kind", RELOADED)
@pytest.mark.parametrize("every", [1, 2])
def test_reloaded_loaders_give_plain_lightnings_batches(kind: str, every: int) -> None:
    settings: dict[str, Any] = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": every}
    plain = fit(RELOADED[kind](), **settings)
    assert len(plain.seen) == 12
    check_alike(plain, fit(RELOADED[kind](), Nop(), **settings))


@pytest.mark.parametrize("kind", RELOADED)
def test_a_second_fit_gives_plain_lightnings_batches(kind: str) -> None:
    nets = []
    for callbacks in ([], [Nop()]):
        pl.seed_everything(3, verbose=False)
        net, loaders, runner = Net(), RELOADED[kind](), trainer(*callbacks, max_epochs=1)
        runner.fit(net, loaders)
        runner.fit_loop.max_epochs = 2
        runner.fit(net, loaders)
        nets.append(net)
    assert len(nets[0].seen) == 6
    check_alike(*nets)


@pytest.mark.parametrize("kind", ["one", "combined", "stream"])
def test_reloaded_loaders_resume(kind: str, tmp_path: Path) -> None:
    check_resumes(RELOADED[kind], tmp_path, 6, max_epochs=3, reload_dataloaders_every_n_epochs=1)


def test_epochs_of_reloading_are_counted_on(tmp_path: Path) -> None:
    check_resumes(RELOADED["one"], tmp_path, 7, max_epochs=4, reload_dataloaders_every_n_epochs=2)


class Fails(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("stop here")


@pytest.mark.parametrize("failing", [False, True])
def test_the_users_loaders_are_back_after_a_fit(failing: bool) -> None:
    loaders = {"a": known(6), "b": persistent()}
    combined = CombinedLoader(loaders, "max_size_cycle")
    samplers = [loader.batch_sampler for loader in loaders.values()]
    if failing:
        with pytest.raises(RuntimeError, match="stop here"):
            fit(combined, Nop(), Fails())
    else:
        fit(combined, Nop(), reload_dataloaders_every_n_epochs=1)
    assert combined.flattened == [*loaders.values()] and combined.iterables == loaders
    assert [loader.batch_sampler for loader in loaders.values()] == samplers
    assert all("_get_iterator" not in vars(loader) for loader in loaders.values())
    assert len(fit(combined, max_epochs=1).seen) == 3
