"""Batch hooks of techniques that have nothing to do: not called in the fit, whole before and after it, and resume exact."""

import copy
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

import lightning_eff as eff
from lightning_eff._core._run._muting.idle_hooks import BATCH_HOOKS
from lightning_eff._core.technique import Technique
from tests.models import loader, module
from tests.runs import MODES, SaveBatches, differences, final_state, fit, resume_from_batches, resume_from_every_step


def idle() -> list[Technique]:
    return [
        eff.ProgressiveStacking(stages=[(0.0, 4)]),
        eff.SharpnessAwareMinimization(rho=0.0),
        eff.SelectiveBackprop(keep=1.0),
        eff.ActivationOffload(min_bytes=inf),
    ]


class Watch(pl.Callback):
    """Which batch hooks of the trainer's techniques Lightning calls."""

    def __init__(self) -> None:
        self.called: list[set[str]] = []
        self.copies: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        techniques = [c for c in trainer.callbacks if isinstance(c, Technique)]  # pyright: ignore[reportAttributeAccessIssue]
        self.called = [{name for name in BATCH_HOOKS if callable(getattr(c, name))} for c in techniques]
        self.copies = [copy.deepcopy(c) for c in techniques]


DRIVES = {"on_train_batch_start", "on_after_backward", "on_train_batch_end"}


@pytest.mark.parametrize(
    ("settings", "more", "expected"),
    [
        ({}, [], set[str]()),
        ({"accumulate_grad_batches": 2}, [], DRIVES),
        ({}, [GradientAccumulationScheduler({0: 1, 2: 3})], DRIVES),
    ],
)
def test_what_lightning_still_calls(settings: dict[str, Any], more: list[pl.Callback], expected: set[str]) -> None:
    techniques, watch = idle(), Watch()
    net, _ = fit("tiny_gpt", lambda: techniques, callbacks=[watch, *more], max_steps=3, **settings)
    assert watch.called == [expected, *[set[str]()] * 3]
    for technique in (*techniques, *watch.copies):
        assert not set(BATCH_HOOKS) & set(vars(technique)) and callable(technique.on_train_batch_end)
    assert "training_step" not in vars(net)


def test_a_working_technique_behind_idle_ones_is_driven() -> None:
    """The first drives the run, whether it works or not; of the others those hooks are called that are their own."""

    class Counts(eff.ProgressiveLayerDropping):
        seen = 0

        def on_before_zero_grad(self, *args: Any) -> None:
            self.seen += 1

    counts, watch = Counts(theta_min=0.5), Watch()
    fit("tiny_gpt", lambda: [*idle(), counts], callbacks=[watch], max_steps=6)
    assert watch.called == [DRIVES, set(), set(), set(), {"on_before_zero_grad"}]
    assert counts.seen == 6 and 0.5 <= counts.report()["theta"] < 1


def test_manual_optimization_is_driven() -> None:
    pl.seed_everything(1, verbose=False)
    net, watch = module("tiny_gpt"), Watch()
    net.automatic_optimization = False
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> None:
        net.manual_backward(step(batch, batch_idx))
        net.optimizers().step()  # pyright: ignore[reportAttributeAccessIssue]

    net.training_step = training_step
    technique = eff.ProgressiveStacking(stages=[(0.0, 4)])
    pl.Trainer(
        accelerator="cpu", max_steps=2, callbacks=[technique, watch], logger=False, enable_checkpointing=False
    ).fit(net, loader("tiny_gpt"))
    assert watch.called == [DRIVES]


def test_idle_techniques_resume_exactly(tmp_path: Path) -> None:
    """Nothing of theirs is called as a batch ends, and yet a checkpoint knows whether validation comes next."""
    assert resume_from_every_step("tiny_gpt", idle, tmp_path, **MODES["validate"]) == {}


def test_idle_techniques_resume_exactly_within_a_window(tmp_path: Path) -> None:
    assert resume_from_batches("tiny_gpt", idle, tmp_path, (1, 3, 4)) == {}


def test_a_saver_before_them_resumes_exactly(tmp_path: Path) -> None:
    """A callback of the user that stands first saves before any technique has heard of the batch's end."""

    def run(resume: Path | None = None) -> Any:
        pl.seed_everything(1, verbose=False)
        net = module("tiny_gpt")
        pl.seed_everything(99 if resume else 1, verbose=False)
        settings: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
        settings |= {"max_steps": 6, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
        t = pl.Trainer(callbacks=[SaveBatches(tmp_path), *idle()] if resume is None else idle(), **settings)
        t.fit(net, loader("tiny_gpt", 20), loader("tiny_gpt", 8, shuffle=False, seed=5), ckpt_path=resume)
        return net, t

    whole = final_state(*run())
    for batch in (1, 2, 3, 5):
        assert differences(whole, final_state(*run(tmp_path / f"batch={batch}.ckpt"))) == [], batch


def test_weights_are_those_of_plain_training() -> None:
    plain, _ = fit("tiny_gpt", list)
    ours, _ = fit("tiny_gpt", idle)
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
