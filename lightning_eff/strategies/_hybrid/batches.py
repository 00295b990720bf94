"""Takes a batch for checks at setup, without changing the order of the loaders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_eff._core import rng
from lightning_eff._core._run.loader_copies import apart
from lightning_eff._core.batches import tensors
from lightning_eff._core.steps import silent


@contextmanager
def stage(trainer: Trainer, name: Any) -> Iterator[None]:
    """Set the trainer's stage to ``name`` for hooks that read it."""
    before = trainer.state.stage
    trainer.state.stage = name
    try:
        yield
    finally:
        trainer.state.stage = before


def first_training_batch(trainer: Trainer, module: LightningModule) -> Any:
    """Return the first training batch on the strategy's device, or None if this fit does not train.

    Lightning draws random numbers when it creates the loaders' iterators. They are drawn now instead of later, so that the
    loaders shuffle as in one process.
    """
    from lightning.pytorch.trainer.states import RunningStage

    with stage(trainer, RunningStage.TRAINING):
        trainer.fit_loop.setup_data()
    with rng.fork(), stage(trainer, RunningStage.TRAINING):
        combined = trainer.fit_loop._combined_loader
        if combined is None or trainer.num_training_batches == 0:
            return None
        again = apart(combined, 0)
        try:
            batch = next(iter(again), None)
        finally:
            again.reset()
        return None if batch is None else on_device(trainer, module, batch[0])


def on_device(trainer: Trainer, module: LightningModule, batch: Any) -> Any:
    """Return the batch after the precision plugin's and the module's transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def loss_on(module: LightningModule, step: Callable[[Any], Any], batch: Any) -> Callable[[], Tensor]:
    """Return a function that runs the training step ``step`` on ``batch`` without a trace, and returns the loss."""

    def loss() -> Tensor:
        with rng.fork(), silent(module, buffers=False):  # the caller compares buffers, and restores them
            output = step(batch)
        return output["loss"] if isinstance(output, Mapping) else output

    return loss


def agreed_batch(
    trainer: Trainer,
    module: LightningModule,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    fitting: bool,
    who: str,
) -> Any:
    """Return a training batch, or None outside a fit. All ranks of ``group`` have the same batch and random state then."""
    same_randomness(group, device, source=dist.get_rank(group) == 0)
    batch = first_training_batch(trainer, module) if fitting else None
    if batch is not None:
        check_same_batch(batch, group, who=who)
    return batch


def check_same_batch(batch: Any, group: dist.ProcessGroup, *, who: str) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` unless they got the same batch; collective."""
    digest = [(path, tuple(t.shape), float(t.double().sum()) if t.numel() else 0.0) for path, t in tensors(batch)]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, repr(digest), group=group)
    ranks = dist.get_process_group_ranks(group)
    apart_from_first = [ranks[i] for i, value in enumerate(found) if value != found[0]]
    if apart_from_first:
        raise ValueError(
            f"{who}: ranks {ranks} hold one replica of the model together, but {apart_from_first} got another first batch"
            f" than rank {ranks[0]}. Let a custom sampler or data set use the data-parallel rank"
            " (trainer.distributed_sampler_kwargs) instead of the global rank, and set seed_everything."
        )


def same_randomness(group: dist.ProcessGroup, device: torch.device, *, source: bool) -> None:
    """Copy the random state of the group's first rank to all its ranks, including the GPU's; collective."""
    if device.type == "cuda":
        torch.cuda.init()  # otherwise the GPU's state is not captured
    state: list[Any] = [rng.capture() if source else None]
    dist.broadcast_object_list(state, group=group, group_src=0)
    if not source:
        rng.restore(state[0])
