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

_TRIED = 8  # batches to try, in case the step skips the first ones


def is_whole(session: Session) -> bool:
    """Return whether every process holds the whole module, not on the meta device."""
    return all(session.replicas.everyone(_problem(session.module) is None))


def check_in_pieces(session: Session, *, who: str, can: bool) -> None:
    """Raise ``ValueError`` if weights that are already divided, or on the meta device, cannot be set once training begins.

    Args:
        session: the run, in ``on_model``.
        who: the technique's name.
        can: whether the technique sets one weight at a time, from the structure of the network.
    """
    strategy = session.trainer.strategy
    if getattr(strategy, "whole_steps", False):
        return
    parts = getattr(strategy, "pipeline_parallel_size", 1), getattr(strategy, "_tensor_parallel_size", 1)
    if parts != (1, 1):
        why = "no process runs a whole step under tensor or pipeline parallelism"
    elif not can:
        why = "it computes with all weights together"
    else:
        return
    problem = next((p for p in session.replicas.everyone(_problem(session.module)) if p), "")
    raise ValueError(
        f"{who}: {problem} before {type(strategy).__name__} sets up, and {why}. Build the module with its weights (without"
        " init_module(empty_init=True), torch.device('meta') or init_on) and let HybridParallelStrategy divide them; or fit"
        f" it for one step on a single device with {who}, save a checkpoint, and start from that without {who}."
    )


def _problem(module: nn.Module) -> str | None:
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(p, DTensor):
            return f"{name} is already divided (DTensor)"
        if p.is_meta:
            return f"{name} is on the meta device"
    return None


def first_batches(session: Session) -> Iterator[Any]:
    """Yield the first few batches of the training loader, taken without affecting the run; none if the fit trains on none."""
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
    """Keep the loader's own sampler under a strategy that trains one replica in several processes, as the strategy would."""
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
    """Run steps on the device and in the precision of the module's weights."""
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
