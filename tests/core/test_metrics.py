"""Callbacks read what techniques report as it is; loggers are told as often as before."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from typing_extensions import override

from lightning_eff import EfficiencyMonitor
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from tests.models import loader, module, trainer
from tests.monitor.test_efficiency_monitor import Memo


class Counts(Technique):
    """Reports how many batches it has seen."""

    batches = asked = 0

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self.batches += 1

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        self.asked += 1
        return {"batches": self.batches}


class Reads(pl.Callback):
    def __init__(self, name: str = "eff/counts/batches") -> None:
        self.name, self.steps, self.validations = name, list[float](), list[float]()

    def on_train_batch_end(self, t: pl.Trainer, *args: Any) -> None:
        self.steps.append(float(t.callback_metrics[self.name]))
        assert t.callback_metrics[self.name] is t.callback_metrics[self.name]

    def on_validation_end(self, t: pl.Trainer, net: pl.LightningModule) -> None:
        self.validations.append(float(t.callback_metrics[self.name]))


def run(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    settings = {"max_steps": 13, "log_every_n_steps": 50, **kwargs}
    t = trainer(*callbacks, **settings)
    validate = loader("tiny_gpt", 4) if "limit_val_batches" in kwargs else None
    t.fit(module("tiny_gpt"), loader("tiny_gpt", 120), validate)
    return t


def test_callbacks_read_each_steps_own_value() -> None:
    seen, memo = Reads(), Memo()
    t = run(Counts(), seen, logger=memo, limit_val_batches=1, val_check_interval=4)
    assert seen.steps == list(range(1, 14))
    assert seen.validations == [4, 8, 12]
    assert t.callback_metrics["eff/counts/batches"] == 13
    assert type(t._logger_connector) is _LoggerConnector  # pyright: ignore[reportAttributeAccessIssue]
    assert not {"_current", "_original"} & set(vars(t._logger_connector))  # pyright: ignore[reportAttributeAccessIssue]
    logged = [step for step, metrics in memo.seen if "eff/counts/batches" in metrics]
    assert logged == []  # no step of 13 is a fiftieth one


def test_loggers_are_told_as_often_as_they_ask() -> None:
    memo = Memo()
    run(Counts(), Reads(), logger=memo, log_every_n_steps=5)
    logged = {step: metrics["eff/counts/batches"] for step, metrics in memo.seen if "eff/counts/batches" in metrics}
    assert logged == {4: 5, 9: 10}


def test_nobody_is_asked_where_nobody_reads() -> None:
    technique = Counts()
    run(technique)
    assert technique.asked == 2  # in the first step, and as the run ends


def test_checkpoints_take_the_best_by_a_current_value(tmp_path: Any) -> None:
    saving = ModelCheckpoint(tmp_path, monitor="eff/counts/batches", mode="max", every_n_train_steps=3)
    run(Counts(), saving, enable_checkpointing=True)
    assert saving.best_model_score == 12


@pytest.mark.parametrize("first", [False, True])
def test_the_monitors_are_current_beside_them(first: bool) -> None:
    seen, technique = Reads("eff/monitor/forward_seconds"), Counts()
    callbacks = [EfficiencyMonitor(), technique] if first else [technique, EfficiencyMonitor()]
    t = run(*callbacks, seen)
    assert len(set(seen.steps[1:])) == 12 and seen.steps == sorted(seen.steps)
    assert t.callback_metrics["eff/counts/batches"] == 13
    assert type(t._logger_connector) is _LoggerConnector  # pyright: ignore[reportAttributeAccessIssue]


def test_an_exception_leaves_lightnings_own() -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("planted")

    t = trainer(Counts(), EfficiencyMonitor(), Fails(), max_steps=3)
    with pytest.raises(KeyError, match="planted"):
        t.fit(module("tiny_gpt"), loader("tiny_gpt"))
    assert type(t._logger_connector) is _LoggerConnector  # pyright: ignore[reportAttributeAccessIssue]
