"""Training loaders with their own state for the tests: torchdata's two kinds, litdata's, and one whose state is not enough."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal

import pytest
import torch
import torchdata.nodes as tn
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.models import make_batch

SIZE = 20


class Rows(Dataset[Any]):
    """A map-style data set without state: sample i is (i, noise), or row i of a model's batch.

    The noise is a random number of torch, or one that no seed determines, as in threads that draw in any order.
    """

    def __init__(
        self, size: int = SIZE, *, noise: bool | Literal["unseeded"] = False, model: str = "", first: int = 0
    ) -> None:
        self.size, self.noise, self.first = size, noise, first
        self.batch = make_batch(model, size) if model else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.batch is None:
            return torch.tensor([self.first + index, self.draw()], dtype=torch.float64)
        if isinstance(self.batch, tuple):
            return tuple(part[index] for part in self.batch)
        return {key: part[index] for key, part in self.batch.items()}

    def draw(self) -> float:
        if self.noise == "unseeded":
            return SystemRandom().random()
        return float(torch.rand(())) if self.noise else 0.0


class Stream(IterableDataset[Any]):
    """A stream in another order in each epoch, which begins anew with each iteration unless a state was loaded.

    Args:
        rows: the samples.
        rank: the rank that reads it, of 2 if there are ranks.
    """

    def __init__(self, rows: Rows, rank: int | None = None) -> None:
        self.rows, self.rank, self.epoch, self.at, self.loaded = rows, rank, -1, 0, False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.epoch, self.at = self.epoch + 1, 0
        self.loaded = False
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        order = order if self.rank is None else order[self.rank :: 2]
        while self.at < len(order):
            self.at += 1
            yield self.rows[order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self.loaded = state["epoch"], state["at"], True


class SizedStream(Stream):
    """One with a length, so that Lightning ends an epoch before the stream says that it has ended."""

    def __len__(self) -> int:
        return len(self.rows)


class ShuffleBuffer(IterableDataset[Tensor]):
    """A stream through a buffer, whose state is the buffer itself, which it changes later."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"buffer": [], "next": 0, "draws": 0}

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            state = self.state
            while len(state["buffer"]) < 6 and state["next"] < SIZE:
                state["buffer"].append(state["next"])
                state["next"] += 1
            if not state["buffer"]:
                state["next"] = 0
                return
            state["draws"] += 1
            drawn = torch.randint(len(state["buffer"]), (), generator=torch.Generator().manual_seed(state["draws"]))
            yield torch.tensor([state["buffer"].pop(int(drawn)), 0.0], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Forgetful:
    """A loader whose state is the epoch and the number of batches, but which skips only whole pairs of batches."""

    def __init__(self, read: list[int] | None = None) -> None:
        self.read, self.epoch, self.given, self.loaded = [] if read is None else read, -1, 0, False

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Tensor]:
        if not (self.loaded and 0 < self.given < 5):
            self.epoch, self.given = self.epoch + 1, 0
        self.loaded = False
        for at in range(self.skipped(), 5):
            self.given = at + 1
            self.read.append(at)
            yield torch.tensor([[100 * self.epoch + at, 0.0]], dtype=torch.float64)

    def skipped(self) -> int:
        """How many batches an iteration skips."""
        return self.given // 2 * 2

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given, self.loaded = state["epoch"], state["given"], True


class Touchy(Forgetful):
    """One whose state is enough, but which loses it if it is asked for its state before the first batch, as litdata's."""

    def skipped(self) -> int:
        return self.given

    def state_dict(self) -> dict[str, Any]:
        self.given = 0 if self.loaded else self.given
        return super().state_dict()


def nodes(
    rows: Rows | None = None,
    sampler: Sampler[int] | None = None,
    *,
    threads: int = 0,
    ahead: int = 0,
    every: int = 1,
    restart: bool = True,
) -> tn.Loader[Any]:
    """A pipeline of torchdata's nodes, from a sampler to batches of 4."""
    rows = Rows() if rows is None else rows
    node: Any = tn.SamplerWrapper(RandomSampler(rows) if sampler is None else sampler)
    node = tn.ParallelMapper(node, rows.__getitem__, num_workers=threads, snapshot_frequency=every)
    node = tn.Mapper(tn.Batcher(node, 4, drop_last=False), default_collate)
    if ahead:
        node = tn.Prefetcher(node, ahead, snapshot_frequency=every)
    return tn.Loader(node, restart_on_stop_iteration=restart)


def mixed_nodes(*, seeded: bool) -> tn.Loader[Any]:
    """A pipeline over two data sets, of which the shorter one is shuffled more than once in an epoch."""
    sources = {}
    for name, first, size in (("a", 0, 7), ("b", 100, 13)):
        rows = Rows(size, first=first)
        generator = torch.Generator().manual_seed(size) if seeded else None
        sources[name] = tn.MapStyleWrapper(rows, RandomSampler(rows, generator=generator))  # pyright: ignore[reportArgumentType]
    node = tn.MultiNodeWeightedSampler(sources, {"a": 0.4, "b": 0.6})
    return tn.Loader(tn.Mapper(tn.Batcher(node, 4, drop_last=False), default_collate))


def seeded() -> RandomSampler:
    """A sampler with a generator of its own, which goes on from epoch to epoch."""
    return RandomSampler(Rows(), generator=torch.Generator().manual_seed(5))


def row(rows: Rows, index: int) -> Any:
    """What litdata stores as sample ``index``."""
    return rows[index]


def litdatas(folder: Path, rows: Rows, *more: Rows, workers: int = 0) -> Callable[[], Any]:
    """Write data sets in litdata's format; the returned function makes a ``StreamingDataLoader`` over them."""
    litdata = pytest.importorskip("litdata", reason="litdata is not installed")
    folders = [folder / f"litdata_{i}" for i in range(1 + len(more))]
    for path, one in zip(folders, (rows, *more), strict=True):
        made = {"chunk_size": 6, "num_workers": 1, "start_method": "fork"}  # it is the process's from then on
        litdata.optimize(partial(row, one), list(range(len(one))), str(path), **made)

    def make() -> Any:
        found = [litdata.StreamingDataset(str(path), shuffle=True) for path in folders]
        data = litdata.CombinedStreamingDataset(found, seed=7) if more else found[0]
        return litdata.StreamingDataLoader(data, batch_size=4, num_workers=workers)

    return make


KINDS: dict[str, Callable[[], Any]] = {
    "nodes": nodes,
    "nodes, noise": lambda: nodes(Rows(noise=True)),
    "nodes, ahead": lambda: nodes(ahead=3),
    "nodes, threads": lambda: nodes(threads=2, ahead=2, every=3),
    "nodes, own generator": lambda: nodes(sampler=seeded(), ahead=2),
    "nodes, set_epoch": lambda: nodes(sampler=DistributedSampler(Rows(), 1, 0)),
    "nodes, no restart": lambda: nodes(ahead=2, restart=False),
    "nodes, a stream": lambda: tn.Loader(
        tn.Prefetcher(tn.Mapper(tn.Batcher(tn.IterableWrapper(Stream(Rows())), 4), default_collate), 2)
    ),
    "nodes, mixed": lambda: mixed_nodes(seeded=True),
    "stream that begins anew": lambda: StatefulDataLoader(Stream(Rows()), 4),
    "sized stream": lambda: StatefulDataLoader(SizedStream(Rows()), 4),
    "live state": lambda: StatefulDataLoader(ShuffleBuffer(), 4),
    "noise in workers": lambda: StatefulDataLoader(Stream(Rows(noise=True)), 4, num_workers=1),
    "persistent workers": lambda: StatefulDataLoader(Rows(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "forgetful": Forgetful,
}
LITDATA: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "litdata": lambda folder: litdatas(folder, Rows()),
    "litdata, workers": lambda folder: litdatas(folder, Rows(), workers=2),
    "litdata, combined": lambda folder: litdatas(folder, Rows(), Rows(12, first=100)),
    "litdata, combined, workers": lambda folder: litdatas(folder, Rows(), Rows(12, first=100), workers=2),
}
