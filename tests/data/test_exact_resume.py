"""ExactResume alone: plain modules and plugins that resume bit for bit from any batch, and what it costs a checkpoint."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_eff import ExactResume, INT8Precision
from tests.cases import Case
from tests.models import loader, module, trainer
from tests.runs import (
    SaveBatches,
    checkpoints,
    differences,
    final_state,
    fit,
    resume_from_batches,
    resume_from_every_step,
)

CASES = {
    "ExactResume": Case(
        active=lambda: ExactResume(),
        neutral=lambda: ExactResume(),
        exact=True,
        figure="batches",
        anywhere=True,
    )
}


def alone() -> list[ExactResume]:
    return [ExactResume()]


@pytest.mark.parametrize("model", ["classifier", "tiny_gpt"])
def test_resumes_from_every_batch(model: str, tmp_path: Path) -> None:
    """In and between accumulation windows; plain Lightning does from none in mid-epoch."""
    assert resume_from_batches(model, alone, tmp_path / "with", None) == {}
    plain = resume_from_batches(model, list, tmp_path / "without", (1, 4, 8))
    assert {name for name, names in plain.items() if any("weights" in n for n in names)} == {
        "batch=1",
        "batch=4",
        "batch=8",
    }


def test_a_plugin_alone_needs_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"plugins": [INT8Precision()]}
    assert resume_from_batches("tiny_gpt", alone, tmp_path / "with", (1, 3, 4), **settings) == {}
    settings = {"plugins": [INT8Precision()]}
    assert set(resume_from_batches("tiny_gpt", list, tmp_path / "without", (3, 8), **settings)) == {
        "batch=3",
        "batch=8",
    }


def test_resumes_with_several_optimizers_driven_by_hand(tmp_path: Path) -> None:
    """A manual step that accumulates leaves its gradients to the next batch: they are saved then, and not after a step."""

    def by_hand(resume: Path | None = None, callbacks: tuple[pl.Callback, ...] = ()) -> Any:
        pl.seed_everything(1, verbose=False)
        net = module("classifier")
        net.automatic_optimization = False
        step = net.training_step

        def training_step(batch: Any, batch_idx: int) -> None:
            optimizer: Any = net.optimizers()
            net.manual_backward(step(batch, batch_idx) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

        net.training_step = training_step
        pl.seed_everything(99 if resume else 1, verbose=False)
        t = trainer(ExactResume(), *callbacks, max_steps=5)
        t.fit(net, loader("classifier", 24), ckpt_path=resume)
        return net, t

    whole = final_state(*by_hand(callbacks=(SaveBatches(tmp_path),)))
    for batch in range(1, 9):
        path = tmp_path / f"batch={batch}.ckpt"
        assert differences(whole, final_state(*by_hand(path))) == [], batch
        assert bool(torch.load(path, weights_only=True)["lightning_eff"]["gradients"]) == (batch % 2 == 1)


def test_gradients_are_in_a_checkpoint_only_within_a_window(tmp_path: Path) -> None:
    fit("tiny_gpt", alone, callbacks=[SaveBatches(tmp_path)], max_steps=5, accumulate_grad_batches=3)
    size = {}
    for batch in range(1, 14):
        path = tmp_path / f"batch={batch}.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        saved = checkpoint["lightning_eff"]["gradients"]
        assert [len(rank) > 0 for rank in saved] == ([] if batch in (3, 5, 8, 10, 13) else [True])
        size[batch] = path.stat().st_size
    weights = sum(p.numel() * p.element_size() for p in module("tiny_gpt").parameters())
    assert weights <= size[4] - size[3] <= 1.3 * weights


def test_validation_within_a_window_and_a_saver_before_it(tmp_path: Path) -> None:
    """Checkpoints saved as validation ends between two optimizer steps, of which it must not clear the gradients."""
    settings: dict[str, Any] = {
        "accumulate_grad_batches": 3,
        "max_steps": 5,
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}-{val_loss:.6f}")
    whole = final_state(*fit("classifier", alone, callbacks=[saver], **settings))
    saved = checkpoints(tmp_path)
    assert len(saved) >= 3
    for path in saved:
        assert differences(whole, final_state(*fit("classifier", alone, resume=path, **settings))) == [], path.stem


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*No checkpoint")
@pytest.mark.parametrize("mode", ["plain", "fails"])
def test_another_run_after_one_that_stopped_within_a_window(mode: str, tmp_path: Path) -> None:
    """A run that a callback stops in mid-window, and one that fails there, go on with the gradients of the window."""

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_progress.total.processed == 4:
                if mode == "fails":
                    raise RuntimeError("planted")
                trainer.should_stop = True

    settings: dict[str, Any] = {"max_steps": 5, "accumulate_grad_batches": 3}
    whole = final_state(*fit("classifier", alone, **settings))
    if mode == "fails":
        saver = OnExceptionCheckpoint(tmp_path, "last")
        with pytest.raises(RuntimeError, match="planted"):
            fit("classifier", alone, callbacks=[Stops(), saver], enable_checkpointing=True, **settings)
    else:
        _, t = fit("classifier", alone, callbacks=[Stops()], **settings)
        t.save_checkpoint(tmp_path / "last.ckpt")
    assert differences(whole, final_state(*fit("classifier", alone, resume=tmp_path / "last.ckpt", **settings))) == []


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*No checkpoint")
def test_a_batch_whose_step_failed_is_trained_on_again(tmp_path: Path) -> None:
    """Lightning counts it as not done; the data must not have gone on without it."""
    seen: list[list[float]] = []

    def run(resume: Path | None, fails_at: int | None) -> None:
        pl.seed_everything(1, verbose=False)
        net, seen_now = module("classifier"), []
        step = net.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            seen_now.append(float(batch[0].sum()))
            if len(seen_now) == fails_at:
                raise RuntimeError("planted")
            return step(batch, batch_idx)

        net.training_step = training_step
        seen.append(seen_now)
        trainer(ExactResume(), OnExceptionCheckpoint(tmp_path, "last"), max_steps=8, enable_checkpointing=True).fit(
            net, loader("classifier"), ckpt_path=resume
        )

    run(None, None)
    with pytest.raises(RuntimeError, match="planted"):
        run(None, 3)
    run(tmp_path / "last.ckpt", None)
    assert seen[1] == seen[0][:3]
    assert seen[2] == seen[0][2:]


def test_changes_nothing_beside_plain_training(tmp_path: Path) -> None:
    whole = final_state(*fit("classifier", list))
    assert differences(whole, final_state(*fit("classifier", alone))) == []
    assert resume_from_every_step("classifier", alone, tmp_path) == {}
