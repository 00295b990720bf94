"""GPT-2 124M on the standard library's bytes for the same seconds in each arm: plain, a copy of it, and techniques.

A short rehearsal passes through the whole schedule and tells what a step costs at each part of the run; from that comes how
many steps fill the time, and the rate decays to zero over just these. What two copies differ by is what another seed changes:
no difference between arms that is smaller says anything. The recipes are those of ``benchmarks/gpt2/recipes``.
"""

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch import Callback, Trainer

import lightning_eff
from benchmarks.gpt2.module import ByteGPT2
from benchmarks.gpu.work import Row, Work
from benchmarks.memory.measure import clock, quiet
from examples.gpt.data import StdlibText

GPT2 = Path(__file__).parent.parent / "gpt2"
BETWEEN = 5  #: validations over a run


def run(work: Work) -> None:
    """Settings: ``recipes``, files' stems; ``seed``; ``seconds`` of training; ``model`` and ``data``: arguments."""
    with quiet():
        work.row("training", lambda: train(work), needs=work.settings["seconds"])


def techniques(recipes: Iterable[str]) -> list[Callback]:
    """The callbacks of recipes' overlays, without the command line's parser."""
    given = [yaml.safe_load((GPT2 / "recipes" / f"{one}.yaml").read_text())["trainer"]["callbacks"] for one in recipes]
    return [getattr(lightning_eff, one["class_path"])(**one.get("init_args", {})) for some in given for one in some]


class Clock(Callback):
    """Times each step from the end of the one before it, validations apart."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = clock()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = clock()
        self.steps.append(now - self.began)
        self.began = now

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = clock()


class Curve(Callback):
    """The validation loss and the seconds of training until then."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.points: list[tuple[int, float, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        loss = trainer.callback_metrics["val_loss"].item()
        self.points.append((trainer.global_step, round(sum(self.clock.steps), 3), loss))


def fit(work: Work, max_steps: int, *, validate: bool) -> tuple[Clock, Curve, pl.LightningModule]:
    """One run of ``max_steps``."""
    s = work.settings
    pl.seed_everything(s["seed"], verbose=False)
    data, model = StdlibText(**s["data"]), ByteGPT2(**s["model"])
    watch = Clock()
    curve = Curve(watch)
    trainer = Trainer(
        accelerator="cpu" if work.tiny else "gpu",
        devices=1,
        precision="32-true" if work.tiny else "bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=max_steps,
        callbacks=[*techniques(s["recipes"]), watch, *([curve] if validate else [])],
        val_check_interval=max(1, max_steps // BETWEEN) if validate else None,
        check_val_every_n_epoch=None,
        limit_val_batches=None if validate else 0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    if validate and (not curve.points or curve.points[-1][0] < max_steps):
        trainer.validate(model, datamodule=data, verbose=False)
    return watch, curve, model


def smoothed(steps: list[float]) -> float:
    """The mean of a rehearsal's steps, each the median of its neighbours': what a kind's first step costs more is left out."""
    around = [steps[max(0, i - 4) : i + 5] for i in range(len(steps))]
    return statistics.mean(statistics.median(some) for some in around)


def train(work: Work) -> Row:
    """Rehearse, then train for the seconds."""
    s = work.settings
    began = time.monotonic()
    rehearsal = smoothed(fit(work, s["rehearsal_steps"], validate=False)[0].steps)
    if not work.tiny:
        torch.cuda.empty_cache()
    num = 6 if work.tiny else max(50, int(s["seconds"] / rehearsal))
    rehearsed = time.monotonic() - began
    watch, curve, model = fit(work, num, validate=True)
    tokens = s["data"]["batch_size"] * s["data"]["block_size"]
    return {
        "recipes": s["recipes"],
        "seed": s["seed"],
        "steps": num,
        "seconds": sum(watch.steps),
        "milliseconds_of_a_step": 1e3 * statistics.median(watch.steps),
        "tokens_per_second": tokens * num / sum(watch.steps),
        "val_loss": curve.points[-1][2],
        "curve": [list(point) for point in curve.points],
        "parameters": sum(p.numel() for p in model.parameters()),
        "rehearsal_seconds": rehearsed,
    }
