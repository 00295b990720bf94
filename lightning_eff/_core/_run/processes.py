"""What the processes of a run tell each other."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._core._needs.offers import is_plain


def gathered(world_size: int, value: Any) -> list[Any]:
    """``value`` of every rank, in rank order, on every rank."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def wrap_again(trainer: Trainer, module: LightningModule) -> None:
    """Let DDP, if that is the strategy, see anew which parameters of ``module`` take gradients."""
    strategy: Any = trainer.strategy
    if is_plain(strategy) and hasattr(strategy, "configure_ddp"):
        strategy.model = module
        strategy.configure_ddp()


def tell_other_processes(before: int, now: int) -> None:
    """Say that a run of ``now`` processes goes on from a checkpoint of ``before``, which are not as many."""
    rank_zero_info(
        f"The checkpoint is of {before} processes and this run has {now}: random"
        " state and the position in the epoch are not taken over, so the run will not repeat the undisturbed one."
    )
