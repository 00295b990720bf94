"""Communication between the processes of a run."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._core._needs.offers import is_plain


def gathered(world_size: int, value: Any) -> list[Any]:
    """Return ``value`` of every rank, in rank order, on every rank."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def replica(trainer: Trainer) -> tuple[int, int]:
    """Return the index of this process's replica, and the number of replicas.

    The processes of one replica train on the same samples. Under DDP each process is a replica.
    """
    share = getattr(trainer.strategy, "distributed_sampler_kwargs", None)  # a single device has none
    return (0, 1) if share is None else (int(share["rank"]), int(share["num_replicas"]))


def wrap_again(trainer: Trainer, module: LightningModule) -> None:
    """Build the DDP wrapper again, if that is the strategy, after ``requires_grad`` of ``module``'s parameters changed."""
    strategy: Any = trainer.strategy
    if is_plain(strategy) and hasattr(strategy, "configure_ddp"):
        strategy.model = module
        strategy.configure_ddp()


class Saved:
    """The rank of the run that saved a checkpoint whose state this process restores.

    In the same layout that is the same rank. In another layout with as many replicas it is the last rank of the same replica,
    because in a pipeline that rank has the head. With another number of replicas there is none.

    Args:
        state: the result of :func:`layout` in the checkpoint; {} in those of earlier versions, whose ranks are replicas.
        trainer: the trainer of this run.
        world_size: the world size of the run that saved.

    Attributes:
        rank: that rank, or None.
        replicas: the number of replicas in the run that saved.
    """

    def __init__(self, state: dict[str, Any], trainer: Trainer, world_size: int) -> None:
        ranks: list[int] = state.get("replicas", list(range(world_size)))
        own, number = replica(trainer)
        self.rank: int | None = None
        self.replicas = len(set(ranks))
        if self.replicas == number:
            same = world_size == trainer.world_size and state.get("layout", "") == _described(trainer)
            self.rank = trainer.global_rank if same else max(i for i, r in enumerate(ranks) if r == own)


def layout(trainer: Trainer, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Return how the processes of this run share its samples and its model, for a checkpoint."""
    return {"replicas": gather(replica(trainer)[0]), "layout": _described(trainer)}


def _described(trainer: Trainer) -> str:
    return str(getattr(trainer.strategy, "layout", ""))


def log_other_replicas(before: int, now: int) -> None:
    """Log that a run of ``now`` replicas resumes from a checkpoint of ``before``."""
    rank_zero_info(
        f"The run that saved this checkpoint divided its samples over {before} processes, and this run divides them over"
        f" {now}. Random state and the position in the epoch are not restored, so the run differs from an uninterrupted one."
    )
