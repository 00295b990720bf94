"""``u``: the share of the run's true budget, whichever limit ends it first."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_eff._core import progress
from tests.core.nop import Nop
from tests.models import loader, module, trainer


class Record(Nop):
    """Notes ``u`` at each micro-batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(session.progress.u)


def run(record: Record, *callbacks: pl.Callback, resume: Path | None = None, **kwargs: Any) -> list[float]:
    """``u`` of each micro-batch of a run with 5 batches an epoch."""
    trainer(record, *callbacks, **kwargs).fit(module("classifier"), loader("classifier"), ckpt_path=resume)
    return record.seen


class Clock(Timer):
    """A timer by whose clock each batch takes one second."""

    def __init__(self, seconds: int) -> None:
        super().__init__(timedelta(seconds=seconds))
        self.now = 0.0

    def time_elapsed(self, stage: Any = "train") -> float:
        return self.now + self._offset

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.now += 1
        super().on_train_batch_end(trainer, *args, **kwargs)


def test_max_steps() -> None:
    assert run(Record(), max_steps=8) == [i / 8 for i in range(8)]


def test_max_epochs_counts_batches() -> None:
    assert run(Record(), max_epochs=2) == pytest.approx([i / 10 for i in range(10)])


def test_max_epochs_of_a_loader_without_a_length_counts_epochs() -> None:
    record = Record()
    trainer(record, max_epochs=4).fit(module("classifier"), Endless())
    assert record.seen == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


class Endless:
    """Two batches, and no length."""

    def __iter__(self) -> Any:
        batches = iter(loader("classifier", shuffle=False))
        yield next(batches)
        yield next(batches)


def test_max_time() -> None:
    assert run(Record(), Clock(4), max_steps=-1, max_epochs=-1) == [0.0, 0.25, 0.5, 0.75]


def test_max_time_of_the_trainer_is_seen() -> None:
    record = Record()
    t = trainer(record, max_time=timedelta(hours=1), max_steps=2)
    t.fit(module("classifier"), loader("classifier"))
    assert record._past is not None
    assert record._past.progress.limits() == {"max_steps": 2, "max_time": 3600.0}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_steps": 4, "max_epochs": 2}, [0, 1 / 4, 2 / 4, 3 / 4]),
        ({"max_steps": 40, "max_epochs": 1}, [0, 1 / 5, 2 / 5, 3 / 5, 4 / 5]),
        ({"max_steps": 40, "max_epochs": 8, "seconds": 2}, [0, 1 / 2]),
        ({"max_steps": 2, "max_epochs": 8, "seconds": 9}, [0, 1 / 2]),
    ],
)
def test_whichever_comes_first(limits: dict[str, int], expected: list[float]) -> None:
    seconds = limits.get("seconds")
    limits = {name: value for name, value in limits.items() if name != "seconds"}
    clocks = [Clock(seconds)] if seconds else []
    assert run(Record(), *clocks, **limits) == pytest.approx(expected)


def test_u_holds_over_an_accumulation_window() -> None:
    # 5 batches an epoch: windows of 2, 2 and 1
    assert run(Record(), max_steps=6, accumulate_grad_batches=2) == pytest.approx(
        [0, 0, 1 / 6, 1 / 6, 2 / 6, 3 / 6, 3 / 6, 4 / 6, 4 / 6, 5 / 6]
    )
    assert run(Record(), max_epochs=2, accumulate_grad_batches=2) == pytest.approx(
        [0, 0, 0.2, 0.2, 0.4, 0.5, 0.5, 0.7, 0.7, 0.9]
    )
    assert run(Record(), Clock(6), max_epochs=-1, accumulate_grad_batches=2) == pytest.approx(
        [0, 0, 2 / 6, 2 / 6, 4 / 6, 5 / 6]
    )


@pytest.mark.parametrize("limits", [{"max_steps": 8}, {"max_epochs": 2}], ids=["max_steps", "max_epochs"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_goes_on_where_it_left_off(limits: dict[str, int], accumulate: int, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    limits = {**limits, "accumulate_grad_batches": accumulate}
    whole = run(Record(), save, enable_checkpointing=True, **limits)
    resumed = run(Record(), resume=tmp_path / "step=2.ckpt", **limits)
    assert resumed == whole[2 * accumulate :]
    assert len(resumed) >= 4


@pytest.mark.parametrize("limits", [{"max_steps": 6}, {"max_epochs": 2}], ids=["max_steps", "max_epochs"])
def test_a_run_resumed_within_a_window_has_the_u_of_that_window(limits: dict[str, int], tmp_path: Path) -> None:
    class SaveWithin(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_idx == 2 and trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    limits = {**limits, "accumulate_grad_batches": 2}
    whole = run(Record(), SaveWithin(), **limits)
    resumed = run(Record(), resume=tmp_path / "within.ckpt", **limits)
    assert resumed[0] == whole[3] > 0
    assert resumed[: len(whole) - 3] == whole[3:]


def test_time_already_spent_counts_after_a_resume(tmp_path: Path) -> None:
    class SaveSecond(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "second.ckpt")

    whole = run(Record(), Clock(8), SaveSecond(), max_epochs=-1)
    assert whole == [i / 8 for i in range(8)]
    assert run(Record(), Clock(8), resume=tmp_path / "second.ckpt", max_epochs=-1) == whole[2:]


def test_u_ends_at_one_and_not_above() -> None:
    record = Record()
    t = trainer(record, max_steps=4)
    t.fit(module("classifier"), loader("classifier"))
    assert record._past is not None
    progress = record._past.progress
    progress.update(0)
    assert progress.u == 1.0
    t.fit_loop.epoch_loop.max_steps = 3
    progress.update(0)
    assert progress.u == 1.0


class Halves(progress.Clock):
    """A clock of the budget by which each batch takes half of what is left."""

    left = 1.0

    def share(self) -> float:
        return 1 - self.left

    def on_train_batch_end(self, *args: Any) -> None:
        self.left /= 2


def test_a_clock_stands_in_for_all_limits() -> None:
    assert run(Record(), Halves(), max_steps=4, max_epochs=100) == [0.0, 0.5, 0.75, 0.875]


def test_a_clock_is_a_budget_and_keeps_within_bounds() -> None:
    class Wild(Halves):
        def share(self) -> float:
            return 3.0 if self.left < 0.4 else -1.0

    assert run(Record(), Wild(), max_steps=3) == [0.0, 0.0, 1.0]
    with_clock = trainer(Halves(), max_steps=-1, max_epochs=-1)
    assert progress.Progress(with_clock).limits() == {"clock": 1.0}
    assert progress.Progress(trainer(max_steps=-1, max_epochs=-1)).limits() == {}


def test_a_clock_must_say_how_much_is_used() -> None:
    with pytest.raises(NotImplementedError, match="Clock does not define"):
        progress.Clock().share()
