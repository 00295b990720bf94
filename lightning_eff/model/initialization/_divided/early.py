"""Setting weights before a strategy divides them, while every process holds the whole module."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_eff._core._lightning.names import is_a, like
from lightning_eff._core.passes import training_batches
from lightning_eff._core.patches import Patches
from lightning_eff._core.session import Session

_TRIED = 8  # batches, where the step passes over the first


def is_whole(session: Session) -> bool:
    """Whether every process holds the whole module, with numbers in it."""
    return all(session.replicas.everyone(_problem(session.module) is None))


def check_in_pieces(session: Session, *, who: str, can: bool) -> None:
    """Raise ``ValueError`` where weights that are divided or nowhere by now cannot be set once training begins.

    Args:
        session: the run, in ``on_model``.
        who: the technique's name.
        can: whether it sets one weight at a time, by what the network is and not by what it computes.
    """
    strategy = session.trainer.strategy
    if getattr(strategy, "whole_steps", False):
        return
    parts = getattr(strategy, "pipeline_parallel_size", 1), getattr(strategy, "_tensor_parallel_size", 1)
    if parts != (1, 1):
        why = "tensor and pipeline parallelism leave no process a whole step to look through"
    elif not can:
        why = "it computes with all of them together"
    else:
        return
    problem = next((p for p in session.replicas.everyone(_problem(session.module)) if p), "")
    raise ValueError(
        f"{who}: {problem} before {type(strategy).__name__} sets up, and {why}; expected a module that is whole on every"
        " process until then. Build it with its weights (without init_module(empty_init=True), torch.device('meta') or"
        " init_on) and leave it to HybridParallelStrategy to divide them; or fit it for a step on a single device with"
        f" {who}, save a checkpoint, and begin from that without {who}."
    )


def _problem(module: nn.Module) -> str | None:
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(p, DTensor):
            return f"{name} is divided already (DTensor)"
        if p.is_meta:
            return f"{name} is on the meta device"
    return None


def first_batches(session: Session) -> Iterator[Any]:
    """Batches of the training loader, each taken beside the run: the first few; none where the fit trains on none."""
    trainer = session.trainer
    with _own_sampler(session):
        trainer.fit_loop.setup_data()
    for index in range(min(_TRIED, int(min(trainer.num_training_batches, _TRIED)))):
        with closing(training_batches(session, index + 1, epoch=0)) as every:
            found = list(every)
        if len(found) > index:
            yield found[index]


@contextmanager
def _own_sampler(session: Session) -> Iterator[None]:
    """A strategy with one replica of the data in several processes leaves the loader its own sampler; so do we, before it."""
    trainer, patches = session.trainer, Patches()
    strategy = trainer.strategy
    if is_a(strategy, ModelParallelStrategy) and strategy.distributed_sampler_kwargs["num_replicas"] == 1:
        patches.set(trainer._accelerator_connector, "use_distributed_sampler", False)
    try:
        yield
    finally:
        patches.restore()


@contextmanager
def as_one_process(session: Session) -> Iterator[None]:
    """Steps run where the module's weights are, and in their precision."""
    strategy, patches = session.trainer.strategy, Patches()
    device = next((p.device for p in session.module.parameters()), torch.device("cpu"))
    plugin, to_device = strategy.precision_plugin, strategy.batch_to_device

    def batch_to_device(batch: Any, _: Any = None, dataloader_idx: int = 0) -> Any:
        return to_device(batch, device, dataloader_idx)

    with ExitStack() as scope:
        scope.callback(setattr, strategy, "precision_plugin", plugin)
        strategy.precision_plugin = like(strategy, Precision)()
        scope.callback(patches.restore)
        patches.set(strategy, "batch_to_device", batch_to_device)
        yield
