"""Loaders that keep their own state go on exactly where a checkpoint was saved: torchdata's, and such as litdata's."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff._core.passes import forward_over_training_data
from tests.core.nop import Nop
from tests.core.test_loaders import Noisy, Recorder
from tests.models import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore:Your `IterableDataset` has `__len__`"
)


class Remembering(Dataset[Tensor]):
    """A map-style data set with a state: how many samples it has given, which is part of them."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        self.given += 1
        return torch.tensor([index, self.given, float(torch.rand(()))], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Endless(IterableDataset[Tensor]):
    """A stream without a length, which goes on where it was as an epoch ends; drawn from the global generator or not.

    It hands out ``epoch`` samples at a time; worker processes have the first ones each time, and each its part of them.
    """

    def __init__(self, noise: bool = True, epoch: int = 20) -> None:
        self.noise, self.epoch, self.place = noise, epoch, 0

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        end = self.place - self.place % self.epoch + self.epoch if info is None else self.epoch
        while self.place < end:
            place, self.place = self.place, self.place + 1
            if place % parts == part:
                yield torch.tensor([place, float(torch.rand(())) if self.noise else 0.0], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Streaming(DataLoader[Tensor]):
    """Keeps its state in litdata's way: what was handed out of which epoch; its iterator is made with its first batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = self.yielded = 0
        self.restore = False

    def __iter__(self) -> Any:
        if not self.restore:
            self.epoch, self.yielded = self.epoch + 1, 0
        skip, self.dataset.start = self.yielded, 1000 * self.epoch  # pyright: ignore[reportAttributeAccessIssue]
        self.dataset.skip = skip * 4  # pyright: ignore[reportAttributeAccessIssue]
        for batch in super().__iter__():
            self.yielded += 1
            yield batch
        self.restore = False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.yielded = state["epoch"], state["yielded"]
        self.restore = 0 < self.yielded < 5


class Part(IterableDataset[Tensor]):
    """The samples of an epoch, without those that were handed out."""

    start = skip = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(self.skip, 20):
            yield torch.tensor([self.start + i, float(torch.rand(()))], dtype=torch.float64)


LOADERS: dict[str, Any] = {
    "map": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True),
    "map, workers": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "map, a state": lambda: StatefulDataLoader(Remembering(), 4, shuffle=True),
    "stream": lambda: StatefulDataLoader(Endless(), 4),
    "stream, workers": lambda: StatefulDataLoader(Endless(noise=False), 4, num_workers=2),
    "litdata's way": lambda: Streaming(Part(), 4),
}


def run(kind: str, *callbacks: pl.Callback, resume: Path | None = None, **kwargs: Any) -> Recorder:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = Recorder()
    trainer(*callbacks, **{"max_steps": 12, **kwargs}).fit(net, LOADERS[kind](), ckpt_path=resume)
    return net


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def check(whole: Recorder, resumed: Recorder, step: int) -> None:
    assert len(resumed.seen) == len(whole.seen) - step, step
    for i, (a, b) in enumerate(zip(whole.seen[step:], resumed.seen, strict=True)):
        assert torch.equal(a, b), f"from step {step}, batch {i} after it"
    assert torch.equal(whole.weight, resumed.weight), step


@pytest.mark.parametrize("kind", sorted(LOADERS))
@pytest.mark.parametrize("limit", [1.0, 3])
def test_batches_are_plain_lightnings_and_a_resumed_run_goes_on_with_them(
    kind: str, limit: float, tmp_path: Path
) -> None:
    """Also where epochs end before the loader does."""
    settings: dict[str, Any] = {"limit_train_batches": limit}
    plain = run(kind, **settings)
    whole = run(kind, Nop(), saver(tmp_path), enable_checkpointing=True, **settings)
    assert len(plain.seen) == len(whole.seen) == 12
    assert all(torch.equal(a, b) for a, b in zip(plain.seen, whole.seen, strict=True))
    assert torch.equal(plain.weight, whole.weight)
    for step in (2, 5, 6) if limit == 1.0 else (3, 7):
        path = tmp_path / f"step={step}.ckpt"
        torch.load(path, weights_only=True)
        check(whole, run(kind, Nop(), resume=path, **settings), step)


@pytest.mark.parametrize("loader", [StatefulDataLoader, DataLoader])
def test_no_worker_outlives_the_run(loader: Any) -> None:
    """As under plain Lightning: loaders that keep their iterator would leave its processes to the garbage collector."""
    kept = loader(Endless(noise=False), 4, num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    trainer(Nop(), max_steps=2).fit(Recorder(), kept)
    assert kept._iterator is None
    assert set(multiprocessing.active_children()) == before


def test_a_plain_trainer_goes_on_from_a_checkpoint_and_the_other_way_round(tmp_path: Path) -> None:
    """With the batches that were to come; random numbers are not in a plain checkpoint."""
    whole = run("stream", Nop(), saver(tmp_path / "ours"), enable_checkpointing=True)
    plain = run("stream", saver(tmp_path / "plain"), enable_checkpointing=True)
    places = [batch[:, 0].tolist() for batch in plain.seen]
    assert [batch[:, 0].tolist() for batch in whole.seen] == places
    resumed = run("stream", resume=tmp_path / "ours" / "step=3.ckpt")
    assert [batch[:, 0].tolist() for batch in resumed.seen] == places[3:]
    natively = run("stream", resume=tmp_path / "plain" / "step=3.ckpt")
    other = run("stream", Nop(), resume=tmp_path / "plain" / "step=3.ckpt")
    assert [b[:, 0].tolist() for b in other.seen] == [b[:, 0].tolist() for b in natively.seen]


@pytest.mark.parametrize("kind", ["map, a state", "stream", "litdata's way"])
def test_going_over_the_data_beside_the_epoch_leaves_its_place_alone(kind: str) -> None:
    class SideOutputs(Nop):
        def on_batch_end(self, session: Any, batch_idx: int) -> None:
            if session.trainer.global_step == 2:
                assert forward_over_training_data(session, 2, epoch=7) == 2

    plain, ours = run(kind), run(kind, SideOutputs())
    seen = [batch for i, batch in enumerate(ours.seen) if i not in (2, 3)]  # those of the two passes
    assert len(seen) == 12 and all(torch.equal(a, b) for a, b in zip(plain.seen, seen, strict=True))
    assert torch.equal(plain.weight, ours.weight)
