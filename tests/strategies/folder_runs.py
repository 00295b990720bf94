"""Runs of two processes with folders of pieces that are written late; see :mod:`tests.strategies.folder_jobs`."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_eff import (
    ExactResume,
    ExponentialMovingAverage,
    GradientNoiseScale,
    HybridParallelStrategy,
    LoRA,
    Muon,
    ReplaceOptimizer,
)
from tests.models import loader, module, trainer
from tests.strategies.technique_jobs import TIMEOUT, shard_itself

STEPS = 6
TECHNIQUES: dict[str, Callable[[], pl.Callback]] = {
    "ExactResume": ExactResume,
    "Muon": lambda: ReplaceOptimizer(Muon, lr=0.02),
    "EMA": lambda: ExponentialMovingAverage(2.0),
    "GradientNoiseScale": lambda: GradientNoiseScale(half_life=3),
    "LoRA": lambda: LoRA(rank=2, save="all"),
}


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Late(Executor):
    """An executor whose tasks run when their result is asked for: as late as a background thread can be."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return _Task(lambda: fn(*args, **kwargs))

    def shutdown(self, *args: Any, **kwargs: Any) -> None: ...


class _Task(Future[None]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            try:
                self.set_result(self._work())
            except BaseException as error:
                self.set_exception(error)
        return super().exception(timeout)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def strategy_of(name: str) -> Any:
    if name == "fsdp2":
        return ModelParallelStrategy(2, 1, process_group_backend="gloo", timeout=TIMEOUT)
    if name == "fsdp2 file":
        return ModelParallelStrategy(
            2, 1, save_distributed_checkpoint=False, process_group_backend="gloo", timeout=TIMEOUT
        )
    layout = {"shard": {"min_num_params": 0}, "tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
    return HybridParallelStrategy(
        save_distributed_checkpoint=True, failure_timeout=None, timeout=TIMEOUT, **layout[name]
    )


def made(
    strategy: str, names: Sequence[str], callbacks: Sequence[pl.Callback], plugins: Sequence[Any] = (), **settings: Any
) -> tuple[pl.LightningModule, pl.Trainer]:
    """A module and its trainer."""
    pl.seed_everything(1, verbose=False)
    net: Any = module("tiny_gpt")
    itself = strategy.startswith("fsdp2")
    if itself and "Muon" in names:  # as the module's own optimizer
        net.configure_optimizers = lambda: Muon(net, adam={"lr": 1e-3})
    techniques = [TECHNIQUES[name]() for name in names if not (itself and name == "Muon")]
    if itself:
        shard_itself(net, techniques)
    t = trainer(
        *techniques,
        *callbacks,
        strategy=strategy_of(strategy),
        devices=2,
        plugins=[*plugins],
        **{"max_steps": STEPS, **settings},
    )
    return net, t


def fit(
    strategy: str,
    names: Sequence[str] = ("ExactResume",),
    callbacks: Sequence[pl.Callback] = (),
    *,
    background: bool = True,
    resume: Path | None = None,
    **settings: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    """A short run with dropout and shuffled batches; a resumed one starts from another seed."""
    net, t = made(strategy, names, callbacks, [AsyncCheckpointIO()] if background else [], **settings)
    pl.seed_everything(99 if resume else 1, verbose=False)
    t.fit(net, loader("tiny_gpt", 40), ckpt_path=resume)
    return net, t


class SaveAt(pl.Callback):
    """Saves as each of these batches ends."""

    def __init__(self, folder: Path, batches: Sequence[int], name: str = "{}.ckpt") -> None:
        self.folder, self.batches, self.name = folder, batches, name

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.batches:
            trainer.save_checkpoint(self.folder / self.name.format(trainer.global_step))
