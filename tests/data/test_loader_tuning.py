"""LoaderTuning: the same batches and random numbers with any setting, the rule by which one is chosen, and what it leaves."""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from lightning_eff import LoaderTuning
from lightning_eff._core.session import Session
from lightning_eff.data._loader.moving import Freedom, why_unmovable
from lightning_eff.data._loader.rule import Measured, best_of, next_setting
from lightning_eff.data._loader.tuner import Setting
from tests.cases import Case
from tests.models import trainer
from tests.runs import fit_yaml

CASES = {
    "LoaderTuning": Case(
        active=lambda: LoaderTuning(num_batches=1, waiting=0.0, max_workers=1, max_prefetch=2),
        neutral=lambda: LoaderTuning(num_batches=None),
        exact=True,
        figure="waiting_seconds",  # beside a technique that chooses samples it measures, and changes nothing
        anywhere=True,
    )
}


class Plain(Dataset[Tensor]):
    """Sample i is i, and the process that made it."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        made_by.append(-1 if worker is None else worker.id)
        return torch.tensor([float(index)], dtype=torch.float64)


made_by: list[int] = []  # in this process


class Noisy(Plain):
    """One of the global generators is drawn from, for samples from 18 on alone."""

    def __init__(self, draw: Callable[[], float], start: int = 18) -> None:
        self.draw, self.start = draw, start

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + (self.draw() if index >= self.start else 0.0)


def draw_torch() -> float:
    return float(torch.rand(()))


def draw_numpy() -> float:
    return float(np.random.rand())


def draw_python() -> float:
    return random.random()


class Counting(Plain):
    """How many samples were made is part of them."""

    made = 0

    def __init__(self) -> None:
        self.made = 0

    def __getitem__(self, index: int) -> Tensor:
        self.made += 1
        return super().__getitem__(index) + self.made


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from (torch.tensor([float(i)]).double() + torch.rand(()) for i in range(part, 24, parts))


class Recorder(pl.LightningModule):
    """Records its batches, draws random numbers as dropout would, and trains one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = batch if isinstance(batch, Tensor) else torch.cat([v.flatten() for v in batch.values()])
        self.seen.append(tensors.clone())
        draws = torch.rand((), dtype=torch.float64) + random.random() + float(np.random.rand())
        return (self.weight * draws).sum() + self.weight.sum() * tensors.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Script(LoaderTuning):
    """Goes from setting to setting, one batch each, whatever was measured."""

    def __init__(self, *settings: Setting, **kwargs: Any) -> None:
        super().__init__(num_batches=1, waiting=0.0, **kwargs)
        self.script = settings

    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        super().on_batch_end(session, batch_idx)
        self._done = True
        assert self._freedom is not None
        done = session.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if self._freedom.in_epoch and done <= len(self.script) and not self._tuners[0].drew:
            self._move(session, self.script[done - 1])


EVERY = [Setting(2, 2), Setting(1, 1), Setting(), Setting(1, 4), Setting(2, 1)]


def run(
    build: Callable[[], Any], *callbacks: pl.Callback, resume: Path | None = None, **kwargs: Any
) -> tuple[Recorder, pl.Trainer]:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net, made_by[:] = Recorder(), []
    t = trainer(*callbacks, **{"max_steps": 14, **kwargs})
    t.fit(net, build(), ckpt_path=resume)
    return net, t


def same(a: Recorder, b: Recorder) -> bool:
    return (
        len(a.seen) == len(b.seen)
        and all(torch.equal(x, y) for x, y in zip(a.seen, b.seen, strict=True))
        and torch.equal(a.weight, b.weight)
    )


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]


# -- the rule

MANY = Freedom(workers=True, prefetch=True, pin=True, in_epoch=True)
LIMITS: dict[str, Any] = {"epoch": 100, "waiting": 0.02, "least_gain": 0.05, "max_workers": 4, "max_prefetch": 4}


def search(times: Callable[[Setting], Measured], own: Setting, free: Freedom, **limits: Any) -> list[Setting]:
    measured: dict[Setting, Measured] = {}
    while (setting := next_setting(measured, own, free, **{**LIMITS, **limits})) is not None:
        measured[setting] = times(setting)
    return list(measured)


def pipeline(setting: Setting) -> Measured:
    """A batch takes 0.3 s to make and 0.1 s to train on; workers make them side by side."""
    waiting = 0.3 if setting.num_workers == 0 else max(0.3 / setting.num_workers - 0.1, 0.0)
    return Measured(waiting, 0.1 + waiting)


def test_workers_are_added_until_nothing_waits() -> None:
    assert search(pipeline, Setting(), Freedom(workers=True)) == [
        Setting(),
        Setting(1, 2),
        Setting(2, 2),
        Setting(4, 2),
    ]
    assert search(pipeline, Setting(), Freedom(workers=True), max_workers=3)[-1] == Setting(3, 2)


def test_nothing_is_tried_where_little_waits() -> None:
    assert search(lambda s: Measured(0.002, 0.1), Setting(), MANY) == [Setting()]
    assert len(search(lambda s: Measured(0.0021, 0.1), Setting(), MANY)) > 1


def test_what_is_not_free_is_not_tried() -> None:
    slow = Measured(0.5, 1.0)
    assert search(lambda s: slow, Setting(), Freedom()) == [Setting()]
    assert search(lambda s: slow, Setting(), Freedom(prefetch=True)) == [Setting()], "there are no workers"
    assert search(lambda s: slow, Setting(2, 2), Freedom(prefetch=True)) == [Setting(2, 2), Setting(2, 4)]
    assert search(lambda s: slow, Setting(), Freedom(pin=True)) == [Setting(), Setting(0, 0, True)]
    assert Setting(2, 2) in search(lambda s: slow, Setting(4, 2), Freedom(workers=True)), (
        "fewer, where too many were given"
    )


def test_another_setting_must_save_enough_and_pays_for_its_start() -> None:
    own, other = Setting(), Setting(1, 2)
    measured = {own: Measured(0.5, 1.0), other: Measured(0.4, 0.951)}
    assert best_of(measured, epoch=100, least_gain=0.05) == own
    measured[other] = Measured(0.4, 0.949)
    assert best_of(measured, epoch=100, least_gain=0.05) == other
    measured[other] = Measured(0.4, 0.5, startup=4.0)  # 0.5 + 4 / n
    assert best_of(measured, epoch=8, least_gain=0.05) == own
    assert best_of(measured, epoch=9, least_gain=0.05) == other
    assert Measured(0.4, 0.5, startup=4.0).share(10) == pytest.approx((0.4 + 0.4) / 0.9)


# -- the same batches

LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Plain(), 4, shuffle=True),
    "own generator": lambda: DataLoader(
        Plain(), 4, shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=1
    ),
    "batch sampler": lambda: DataLoader(Plain(), batch_sampler=BatchSampler(RandomSampler(range(24)), 4, False)),
    "workers": lambda: DataLoader(Plain(), 4, shuffle=True, num_workers=2),
    "torch draws": lambda: DataLoader(Noisy(draw_torch), 4, shuffle=True),
    "numpy draws in workers": lambda: DataLoader(Noisy(draw_numpy), 4, shuffle=True, num_workers=2),
    "python draws": lambda: DataLoader(Noisy(draw_python, 0), 4),
    "a count": lambda: DataLoader(Counting(), 4),
}


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_batches_and_random_numbers_are_plain_trainings(kind: str) -> None:
    plain, _ = run(LOADERS[kind])
    after = states()
    technique = Script(*EVERY)
    ours, _ = run(LOADERS[kind], technique)
    assert same(plain, ours)
    assert states() == after
    switches = technique.report()["switches"]
    if "draws" in kind or kind == "a count":
        assert switches >= (0 if "workers" in kind else 2), "there and back"
        assert technique.report()["num_workers"] == (2 if "workers" in kind else 0)
    else:
        assert switches == len(EVERY) - (kind == "workers"), "whose first is its own"


@pytest.mark.slow  # the contract resumes from every step of a run that changes its setting
def test_resumes_bit_for_bit_whatever_was_tried(tmp_path: Path) -> None:
    """Also where the resumed run makes the rest with other settings than the saved one."""
    for kind in ("shuffle", "workers"):
        folder = tmp_path / kind
        saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        whole, _ = run(LOADERS[kind], Script(*EVERY), saver, enable_checkpointing=True)
        for step in (2, 8):
            resumed, _ = run(LOADERS[kind], Script(*EVERY[::-1] * 2), resume=folder / f"step={step}.ckpt")
            assert len(resumed.seen) == 14 - step
            assert all(torch.equal(a, b) for a, b in zip(whole.seen[step:], resumed.seen, strict=True)), (kind, step)
            assert torch.equal(whole.weight, resumed.weight)


# -- what fails, or cannot be


class OnlyAlone(Plain):
    """Cannot make samples in a worker."""

    def __getitem__(self, index: int) -> Tensor:
        if get_worker_info() is not None:
            raise KeyError("planted")
        return super().__getitem__(index)


def test_a_setting_that_fails_is_given_up_for_the_very_batch() -> None:
    def build() -> DataLoader[Tensor]:
        return DataLoader(OnlyAlone(), 4, shuffle=True)

    technique = LoaderTuning(num_batches=1, waiting=0.0)
    plain, _ = run(build)
    ours, _ = run(build, technique)
    assert same(plain, ours)
    assert technique.report()["num_workers"] == 0 and technique.report()["switches"] == 2
    assert "num_workers=1, prefetch_factor=2 failed (" in technique.summary()


@pytest.mark.parametrize(
    ("reason", "told"), [(("no room for planted reasons",), "no room for planted reasons"), ((), "OSError")]
)
def test_a_setting_whose_workers_cannot_start_is_given_up(
    reason: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise OSError(*reason)

    plain, _ = run(LOADERS["shuffle"])
    monkeypatch.setattr(torch.multiprocessing.Process, "start", fail)
    technique = LoaderTuning(num_batches=1, waiting=0.0, max_workers=2)
    ours, _ = run(LOADERS["shuffle"], technique)
    assert same(plain, ours)
    assert f"failed (OSError: {told})" in technique.summary()


def unlike() -> DataLoader[Tensor]:
    return DataLoader(Plain(), 4, sampler=Own())


class Own(RandomSampler):
    """Looks at what has been made so far."""

    def __init__(self) -> None:
        super().__init__(range(24))

    def __iter__(self) -> Iterator[int]:
        for i in range(24):
            yield (i + len(made_by)) % 24


class Handle(Plain):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Batches:
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(6, 1).double())


KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (
        lambda: DataLoader(Noisy(np.random.default_rng(3).random, 0), 4),
        r"its data set \(Noisy\) cannot move to other processes: it holds a random generator",
    ),
    "handle": (lambda: DataLoader(Handle(), 4), "cannot be pickled, so processes cannot share it"),
    "draws": (
        lambda: DataLoader(Noisy(draw_torch, 0), 4),
        "making samples draws random numbers or changes the data set",
    ),
    "seeded draws": (
        lambda: DataLoader(Noisy(draw_torch, 0), 4, worker_init_fn=partial(pl_worker_init_function, rank=0)),
        "making samples draws random numbers or changes the data set",
    ),
    "stream": (lambda: DataLoader(Stream(), 4), "each worker of an iterable data set has its own part"),
    "worker_init_fn": (
        lambda: DataLoader(Plain(), 4, worker_init_fn=print),
        "worker_init_fn may make workers differ",
    ),
    "sampler": (unlike, r"its sampler \(BatchSampler\) may depend on the run"),
    "several": (lambda: {"a": DataLoader(Plain(), 4), "b": DataLoader(Plain(), 6)}, "it is one of several"),
    "out of order": (lambda: DataLoader(Plain(), 4, in_order=False), "allows batches in any order"),
    "own state": (lambda: Stateful(Plain(), 4), "a Stateful keeps its own state"),
    "no DataLoader": (Batches, "a Batches is not a torch DataLoader"),
}


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_what_might_change_batches_is_left_alone_and_said(kind: str) -> None:
    build, reason = KEPT[kind]
    technique = LoaderTuning(num_batches=1, waiting=0.0)
    ours, _ = run(build, technique, max_steps=8)
    plain, _ = run(build, max_steps=8)
    assert same(plain, ours)
    assert re.search(f"the number of workers stays 0, because .*{reason}", technique.summary()), technique.summary()
    assert technique.report()["num_workers"] == 0
    assert technique.report()["switches"] == (2 if "draws" in kind else 0)


def test_the_seeding_function_of_lightning_is_no_reason() -> None:
    """LightningCLI adds it under ``seed_everything: true``."""

    def build() -> DataLoader[Tensor]:
        return DataLoader(Plain(), 4, worker_init_fn=partial(pl_worker_init_function, rank=0))

    technique = Script(Setting(2, 2))
    ours, _ = run(build, technique, max_steps=8)
    plain, _ = run(build, max_steps=8)
    assert same(plain, ours) and technique.report()["num_workers"] == 2


def test_persistent_workers_are_left_alone() -> None:
    technique = LoaderTuning(num_batches=1, waiting=0.0)

    def build() -> DataLoader[Tensor]:
        return DataLoader(Noisy(draw_torch), 4, shuffle=True, num_workers=1, persistent_workers=True)

    ours, _ = run(build, technique)
    plain, _ = run(build)
    assert same(plain, ours) and technique.report()["switches"] == 0
    assert "its persistent workers keep their state" in technique.summary()


def test_prefetch_of_what_draws_changes_as_an_epoch_begins() -> None:
    """Each worker draws what it would, however far it is ahead."""

    def build() -> DataLoader[Tensor]:
        return DataLoader(Noisy(draw_numpy, 0), 4, shuffle=True, num_workers=1)

    technique = LoaderTuning(num_batches=1, waiting=0.0, max_prefetch=4)
    ours, _ = run(build, technique, max_steps=16)
    plain, _ = run(build, max_steps=16)
    assert same(plain, ours)
    assert technique.report()["num_workers"] == 1 and technique.report()["switches"] >= 1


@pytest.mark.parametrize(("workers", "limit", "moves"), [(0, 1.0, False), (1, 3, False), (1, 1.0, True)])
def test_a_generator_is_no_further_ahead_as_an_epoch_ends(workers: int, limit: float, moves: bool) -> None:
    def build() -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Plain(), 4, shuffle=True, generator=generator, num_workers=workers)

    plain, _ = run(build, limit_train_batches=limit)
    technique = Script(Setting(2, 1), Setting(1, 1), Setting(1, 4))
    ours, _ = run(build, technique, limit_train_batches=limit)
    assert same(plain, ours)
    assert (technique.report()["switches"] == 3) == moves
    assert ("its random generator would be further ahead" in technique.summary()) != moves


def test_a_data_set_that_is_changed_in_mid_epoch_counts_at_once() -> None:
    class Harder(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 9:
                trainer.train_dataloader.dataset.start = 0  # pyright: ignore[reportOptionalMemberAccess]

    def build() -> DataLoader[Tensor]:
        return DataLoader(Noisy(lambda: 0.5), 4, shuffle=True)

    plain, _ = run(build, Harder())
    technique = Script(Setting(2, 2), Setting(2, 1))
    assert same(plain, run(build, Harder(), technique)[0])
    assert technique.report()["num_workers"] == 0


def test_functions_without_a_name_go_along_where_workers_begin_as_copies() -> None:
    data = Noisy(lambda: 1.0)
    assert why_unmovable(data, fork=True) is None
    assert "cannot be pickled" in str(why_unmovable(data, fork=False))
    generator = np.random.default_rng(1)
    assert "random generator (Generator)" in str(why_unmovable(Noisy(lambda: generator.random()), fork=True))
    assert why_unmovable([torch.zeros(10**6), np.zeros(10**6), "x" * 10**6, list(range(10**6))], fork=True) is None


# -- what is measured and told


class Slow(Plain):
    """Takes a fiftieth of a second a batch to make, as long as it is trained on."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.005)
        return super().__getitem__(index)


def test_a_slow_loader_gets_workers_and_the_run_says_what_it_cost() -> None:
    class Step(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    technique = LoaderTuning(num_batches=4, max_workers=1, max_prefetch=2)
    trainer(technique, max_steps=20).fit(Step(), DataLoader(Slow(), 4))
    told = technique.report()
    assert told["num_workers"] == 1 and told["switches"] == 1
    own, other = (technique._measured[setting] for setting in (Setting(), Setting(1, 2)))
    assert own.waiting > 0.02 and own.seconds > 0.04 and other.waiting < own.waiting
    assert 0.1 < float(told["waiting_seconds"]) < technique._seconds
    assert re.search(
        r"the device waited [\d.]+ s for the loader, \d+% of the time; using num_workers=1, prefetch_factor=2 from step",
        technique.summary(),
    )


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "LoaderTuning", {"num_batches": 1, "waiting": 0.0, "max_workers": 1}, max_steps=6)
    assert "the device waited" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_batches": 0}, r"num_batches=0\): expected an integer >= 1, or None"),
        ({"waiting": 1.0}, r"waiting=1.0\): expected a number in \[0, 1\): the fraction of the time"),
        ({"least_gain": -0.1}, r"least_gain=-0.1\): expected a number in \[0, 1\)"),
        ({"max_workers": -1}, r"max_workers=-1\): expected an integer >= 0, or None"),
        ({"max_prefetch": 0}, r"max_prefetch=0\): expected an integer >= 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderTuning(**arguments)
