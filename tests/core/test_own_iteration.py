"""Loaders with an iteration of their own: indices belong to the yielded batch, and a run resumes with the same batches."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_eff import SAF, RobustImportanceSampling, SampleSubset
from tests.core.nop import Nop
from tests.models import trainer


class Numbered(Dataset[dict[str, Tensor]]):
    """Sample i holds i and a little noise from the global generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "at": torch.tensor(index),
            "x": torch.tensor([index, float(torch.rand(()))]),
            "y": torch.tensor(index % 3),
        }


class Skips(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch for number, batch in enumerate(super().__iter__()) if number >= 2)

    def __len__(self) -> int:
        return super().__len__() - 2


class Repeats(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() for _ in range(2))

    def __len__(self) -> int:
        return 2 * super().__len__()


class LooksAhead(DataLoader[Any]):
    """Three batches are made before the first is yielded, and they come in reversed order."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        while held := list(itertools.islice(batches, 3)):
            while held:
                yield held.pop()


class DropsAtRandom(DataLoader[Any]):
    """Draws between batches, while training draws from the same generators."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if random.random() < 0.7 or torch.rand(()) < 0.5:
                yield batch

    def __len__(self) -> int:
        raise TypeError


class Rotates(DataLoader[Any]):
    """Counts its epochs, and begins each at another place."""

    begun = 0

    def __iter__(self) -> Any:
        batches, start = list(super().__iter__()), self.begun
        self.begun += 1
        yield from batches[start:]
        yield from batches[:start]


class Holds(DataLoader[Any]):
    """Hands its iteration to a loader that it holds, as accelerate's adapters do."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.base = DataLoader(dataset, **kwargs)
        self.__dict__["batch_sampler"] = self.base.batch_sampler

    def __iter__(self) -> Any:
        return (batch for number, batch in enumerate(iter(self.base)) if number != 1)

    def __len__(self) -> int:
        return len(self.base) - 1


KNOWN: dict[str, Callable[[], Any]] = {
    "skips": lambda: Skips(Numbered(), 4, shuffle=True),
    "skips, workers": lambda: Skips(Numbered(), 4, shuffle=True, num_workers=2),
    "repeats": lambda: Repeats(Numbered(), 4, shuffle=True),
    "looks ahead": lambda: LooksAhead(Numbered(), 4, shuffle=True),
    "rotates": lambda: Rotates(Numbered(), 4, shuffle=True),
    "holds": lambda: Holds(Numbered(), batch_size=4, shuffle=True),
}


class Copies(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ({**batch} for batch in super().__iter__())


class WritesInto(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            for value in batch.values():
                value.copy_(value.flip(0))
            yield batch


class Replaces(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            batch.update({key: value.flip(0) for key, value in batch.items()})
            yield batch


class Elsewhere(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(DataLoader(self.dataset, 4))


class Merges(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = super().__iter__()
        for first, second in zip(batches, batches, strict=True):
            yield {key: torch.cat([first[key], second[key]]) for key in first}

    def __len__(self) -> int:
        return super().__len__() // 2


class OneIterator(DataLoader[Any]):
    """One iterator for all epochs, made with the loader, as timm's MultiEpochsDataLoader has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sampler = self.batch_sampler
        self.__dict__["batch_sampler"] = itertools.chain.from_iterable(iter(lambda: sampler, None))
        self.number = len(sampler)  # pyright: ignore[reportArgumentType]
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(self.number):
            yield next(self.iterator)

    def __len__(self) -> int:
        return self.number


UNKNOWN: dict[str, Callable[[], Any]] = {
    "copies": lambda: Copies(Numbered(), 4),
    "writes into": lambda: WritesInto(Numbered(), 4),
    "replaces": lambda: Replaces(Numbered(), 4),
    "merges": lambda: Merges(Numbered(), 4),
    "one iterator": lambda: OneIterator(Numbered(), 4),
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.drop = torch.nn.Linear(2, 3), torch.nn.Dropout(0.1)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(torch.cat([batch["at"][:, None], batch["x"]], dim=1))
        return torch.nn.functional.cross_entropy(self.drop(self.f(batch["x"])), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Indices(Nop):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
        self.found.append((session.sample_indices, batch["at"].tolist()))


def fit(loader: Any, *callbacks: pl.Callback, resume: Path | None = None, epochs: int = 2) -> Net:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    random.seed(3 if resume is None else 44)
    net = Net()
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": epochs, "enable_checkpointing": saves}
    trainer(*callbacks, **options).fit(net, loader, ckpt_path=resume)
    return net


@pytest.mark.parametrize("kind", KNOWN)
def test_indices_are_those_of_the_batch_that_is_yielded(kind: str) -> None:
    indices = Indices()
    plain, ours = fit(KNOWN[kind]()), fit(KNOWN[kind](), indices)
    assert len(indices.found) >= 8
    assert all(told == held for told, held in indices.found)
    assert len(plain.seen) == len(ours.seen) and all(map(torch.equal, plain.seen, ours.seen))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_indices_of_other_batches_are_not_known(kind: str) -> None:
    indices = Indices()
    plain, ours = fit(UNKNOWN[kind]()), fit(UNKNOWN[kind](), indices)
    assert all(told is None for told, _ in indices.found) and len(indices.found) >= 6
    assert all(map(torch.equal, plain.seen, ours.seen))


@pytest.mark.parametrize("kind", ["merges", "replaces"])
def test_what_needs_indices_is_refused_at_the_first_batch(kind: str) -> None:
    loader = UNKNOWN[kind]()
    name = type(loader).__name__
    with pytest.raises(ValueError, match=rf"SAF: .*{name}.__iter__ does not yield the batch objects"):
        fit(loader, SAF(lag=1))
    loader = UNKNOWN[kind]()
    with pytest.raises(
        ValueError, match=rf"RobustImportanceSampling: .*{name}.__iter__ does not yield the batch objects"
    ):
        fit(loader, RobustImportanceSampling())


def test_a_choice_that_does_not_reach_the_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SampleSubset: the loader's sampler .* had not ended"):
        fit(UNKNOWN["one iterator"](), SampleSubset(0.5))
    with pytest.raises(ValueError, match=r"SampleSubset: Elsewhere\.__iter__ does not take its batches from"):
        fit(Elsewhere(Numbered(), 4), SampleSubset(0.5))
    loader = Merges(Numbered(), 4)
    assert len(fit(loader, SampleSubset(0.5), epochs=1).seen) == 1  # of 12 samples in 3 batches: one pair


def test_nothing_is_left_on_the_loader() -> None:
    for make in KNOWN.values():
        loader = make()
        held = [loader, *(value for value in vars(loader).values() if isinstance(value, DataLoader))]
        before = [{key: value for key, value in vars(part).items() if key != "begun"} for part in held]
        fit(loader, Nop(), epochs=1)
        assert [{key: value for key, value in vars(part).items() if key != "begun"} for part in held] == before


RESUMED = {**KNOWN, **UNKNOWN, "drops at random": lambda: DropsAtRandom(Numbered(), 2, shuffle=True)}


@pytest.mark.parametrize("kind", RESUMED)
def test_resume_sees_the_batches_that_were_to_come(kind: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(RESUMED[kind](), Nop(), saver)
    count = len(whole.seen)
    for step in {1, count // 2 - 1, count // 2, count // 2 + 2, count - 1}:
        resumed = fit(RESUMED[kind](), Nop(), resume=tmp_path / f"step={step}.ckpt")
        assert len(resumed.seen) == count - step, step
        assert all(map(torch.equal, whole.seen[step:], resumed.seen)), step
        assert torch.equal(whole.f.weight, resumed.f.weight), step


def test_a_loader_that_does_not_repeat_itself_is_told_of(tmp_path: Path) -> None:
    other = iter(range(1, 100))

    class Moves(DataLoader[Any]):
        def __iter__(self) -> Any:
            batches = list(super().__iter__())
            start = next(other) % len(batches)
            yield from batches[start:]
            yield from batches[:start]

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    fit(Moves(Numbered(), 4), Nop(), saver)
    with pytest.warns(UserWarning, match="Moves: the training loader does not repeat the batches"):
        fit(Moves(Numbered(), 4), Nop(), resume=tmp_path / "step=2.ckpt")
