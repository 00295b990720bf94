"""InMemoryData: each sample is made once, the same to the bit, and what is random is refused."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_eff import InMemoryData
from lightning_eff._core.session import Session
from lightning_eff.data import in_memory_data
from lightning_eff.data._loader.kept import Kept, Reader, Writer, positions, same
from tests.cases import Case
from tests.models import TinyClassifier, flat, module, trainer

CASES = {
    "InMemoryData": Case(
        active=lambda: InMemoryData(), neutral=lambda: InMemoryData(0), exact=True, figure="samples", anywhere=True
    )
}


class Pair(NamedTuple):
    left: Tensor
    right: str


SAMPLES = [
    torch.arange(6.0).reshape(2, 3).T,
    {"ids": torch.arange(3), "mask": np.array([[True], [False]]), "name": "a", "n": 7, "none": None},
    {"ids": torch.arange(5), "mask": np.zeros((0, 2), bool), "name": "b", "n": 8, "none": None},
    (torch.tensor(1.5, dtype=torch.bfloat16), [1, 2.5], Pair(torch.ones(2, dtype=torch.complex64), "x")),
    {"nested": [{"deep": (torch.zeros(0), np.float32(2))}]},
    np.arange(4, dtype=np.int16)[::2],
    3,
]


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.samples")
    for sample in SAMPLES:
        writer.add(sample)
    writer.close()
    reader: Reader = pickle.loads(pickle.dumps(Reader(writer.path)))
    assert len(reader) == len(SAMPLES)
    for i in (3, 0, 6, 1, 2, 5, 4):
        found = reader.read(i)
        assert type(found) is type(SAMPLES[i]) and same(found, SAMPLES[i]), i
    assert type(reader.read(3)[2]) is Pair
    changed = reader.read(0)
    changed.zero_()
    assert same(reader.read(0), SAMPLES[0]), "a copy"
    assert not same(SAMPLES[1], SAMPLES[2]) and not same(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


class Costly(Dataset[Any]):
    """Notes how often each sample was made, also in worker processes."""

    def __init__(self, size: int = 24) -> None:
        self.made = torch.zeros(size, dtype=torch.long).share_memory_()
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(size, 8, generator=g), torch.randint(3, (size,), generator=g)
        self.title = "costly"

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.made[index] += 1
        return self.x[index], self.y[index]


class Changing(TinyClassifier):
    """Changes its batch in place, and keeps what it saw."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = [*getattr(self, "seen", []), batch[0].clone()]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[0].zero_()


def fitted(technique: Any, dataset: Any, **settings: Any) -> Changing:
    pl.seed_everything(1, verbose=False)
    net = Changing()
    given = {"batch_size": 4, "shuffle": True, **settings}
    trainer(*technique, max_epochs=3).fit(net, DataLoader(dataset, **given))
    return net


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_made_once_and_batches_are_the_same(workers: int) -> None:
    dataset, plain = Costly(), Costly()
    kept = InMemoryData()
    net, reference = fitted([kept], dataset, num_workers=workers), fitted([], plain, num_workers=workers)
    assert all(torch.equal(a, b) for a, b in zip(net.seen, reference.seen, strict=True))
    assert torch.equal(flat(net), flat(reference))
    again = positions(24, 8, 0) * 2 + [i for epoch in range(3) for i in positions(24, 4, epoch)]  # to compare them
    assert dataset.made.tolist() == [1 + again.count(i) for i in range(24)]
    assert plain.made.tolist() == [3] * 24
    assert kept.report()["samples"] == 24 and "kept 24 samples" in kept.summary()


def test_a_fraction_is_kept() -> None:
    dataset = Costly()
    net, reference = fitted([InMemoryData(0.25)], dataset), fitted([], Costly())
    assert torch.equal(flat(net), flat(reference))
    assert dataset.made[6:].tolist() == [3] * 18 and int(dataset.made[:6].max()) <= 6


def test_the_loader_gets_its_data_set_back_and_the_file_is_removed(tmp_path: Path) -> None:
    dataset = Costly()
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            inner: Any = trainer.train_dataloader
            seen.append((inner.dataset, isinstance(inner.dataset, Costly), inner.dataset.title, [*tmp_path.iterdir()]))

    data = DataLoader(dataset, 4)
    trainer(InMemoryData(folder=str(tmp_path)), Look(), max_steps=1).fit(TinyClassifier(), data)
    ((inside, is_costly, title, files),) = seen
    assert type(inside) is Kept and is_costly and title == "costly" and len(files) == 2
    assert data.dataset is dataset and not [*tmp_path.iterdir()]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Costly):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                raise KeyError("sample 9")
            return super().__getitem__(index)

    data = DataLoader(Broken(), 4)
    with pytest.raises(KeyError, match="sample 9"):
        trainer(InMemoryData(folder=str(tmp_path)), max_steps=1).fit(TinyClassifier(), data)
    assert type(data.dataset) is Broken and not [*tmp_path.iterdir()]


class Random(Costly):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + (self.draw() if index > 20 else 0.0), y


class Counting(Costly):
    """Depends on how often it was asked, without drawing a number."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        Counting.calls += 1
        return x + Counting.calls, y


def of_torch() -> float:
    return float(torch.rand(()))


def of_numpy() -> float:
    return float(np.random.rand())


class Own:
    """A generator that the data set holds, and that draws zeros."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return 0.0 * float(torch.rand((), generator=self.generator))
        return 0.0 * self.generator.random()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "draw",
    [
        *(of_torch, of_numpy, random.random),
        *(Own(torch.Generator()), Own(np.random.default_rng(0)), Own(random.Random(0))),
    ],
)
def test_random_samples_are_refused(draw: Callable[[], float], workers: int) -> None:
    with pytest.raises(
        ValueError, match=r"draws random numbers or changes the data set \(Random\), so a kept sample would"
    ):
        fitted([InMemoryData()], Random(draw), num_workers=workers)


def test_samples_that_differ_when_read_again_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 1 differs when it is read again \(Counting\)"):
        fitted([InMemoryData()], Counting())


class Flipping(Costly):
    """Draws from a generator that nobody can see, whose first two draws agree."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (-x if self.made[index] > 2 else x), y


def test_draws_that_agree_once_by_chance_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample \d+ differs when it is read again \(Flipping\)"):
        fitted([InMemoryData()], Flipping())


class Anew(Costly):
    """Depends on the epoch. Its hidden state is no plain number."""

    epoch: Any = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + int(self.epoch), y

    def set_epoch(self, epoch: int) -> None:
        self.epoch = torch.tensor(epoch)


class Calls(pl.Callback):
    """Tells the loader's data set the epoch."""

    def __init__(self, hook: str, way: str) -> None:
        def call(trainer: pl.Trainer, module: pl.LightningModule) -> None:
            data: Any = trainer.train_dataloader
            if way == "set_epoch":
                data.dataset.set_epoch(trainer.current_epoch)
            else:
                data.dataset.epoch = trainer.current_epoch

        setattr(self, hook, call)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", ["set_epoch", "attribute"])
def test_samples_that_change_in_a_later_epoch_end_the_run(way: str, workers: int, tmp_path: Path) -> None:
    dataset = Anew()
    kept = InMemoryData(folder=str(tmp_path))
    with pytest.raises(ValueError, match=r"sample \d+ differs from the kept one in epoch 1 \(Anew\), so a kept sample"):
        fitted([kept, Calls("on_train_epoch_start", way)], dataset, num_workers=workers)
    assert int(dataset.epoch) == 1 and not [*tmp_path.iterdir()]


class Gone(Anew):
    """Its files are gone after the first epoch."""

    def __getitem__(self, index: int) -> Any:
        if self.epoch:
            raise OSError("planted")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_again_ends_the_run_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one's word."""
    told: list[Any] = []
    gather = Session.gather
    monkeypatch.setattr(Session, "gather", lambda self, value: told.append(value) or gather(self, value))
    with pytest.raises(OSError, match="planted"):
        fitted([InMemoryData(), Calls("on_train_epoch_start", "set_epoch")], Gone())
    assert told[-1] == "planted"


def test_an_epoch_that_a_resumed_run_missed_ends_it(tmp_path: Path) -> None:
    """The file is filled before hooks that start an epoch; those of a resumed run then change the data set."""
    net, data = TinyClassifier(), DataLoader(Anew(), 4)
    first = trainer(max_epochs=2)
    first.fit(net, data)
    first.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="differs from the kept one in epoch 2"):
        trainer(InMemoryData(), Calls("on_train_epoch_start", "set_epoch"), max_epochs=4).fit(
            TinyClassifier(), data, ckpt_path=tmp_path / "a.ckpt"
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Costly())


@pytest.mark.parametrize("data", [DataLoader(Stream(), 4), [1, 2]], ids=["iterable", "list"])
def test_data_without_samples_by_index_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"which has no samples by index\. Use a DataLoader with a map-style data set"):
        trainer(InMemoryData(), max_steps=1).fit(TinyClassifier(), data)


def test_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(in_memory_data.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError, match=r"InMemoryData\(keep=1\): the samples need about .* Use keep=0\.\d+, or another"
    ):
        fitted([InMemoryData(folder=str(tmp_path))], Costly())
    with pytest.raises(ValueError, match="there is no such folder"):
        InMemoryData(folder=str(tmp_path / "gone"))


def test_indices_beside_the_file_are_the_data_sets_own(tmp_path: Path) -> None:
    dataset = Costly(8)
    writer = Writer(tmp_path / "a.samples")
    for i in range(6):
        writer.add(dataset[i])
    writer.close()
    kept = copy.copy(Kept(dataset, Reader(writer.path)))
    dataset.made.zero_()
    assert torch.equal(kept[-3][0], dataset.x[5]) and torch.equal(kept[np.int64(2)][0], dataset.x[2])
    assert dataset.made.sum() == 0
    assert torch.equal(kept[7][0], dataset.x[7]) and torch.equal(kept[-1][0], dataset.x[7])
    with pytest.raises(IndexError):
        kept[8]


def test_text_of_any_length_trains_as_before() -> None:
    from tests.models import loader

    nets = []
    for techniques in ([], [InMemoryData()]):
        pl.seed_everything(2, verbose=False)
        nets.append(module("tiny_gpt"))
        trainer(*techniques, max_epochs=2).fit(nets[-1], loader("tiny_gpt"))
    assert torch.equal(flat(nets[0]), flat(nets[1]))
