"""What the processes of a run tell each other."""

from collections.abc import Callable
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


def replica(trainer: Trainer) -> tuple[int, int]:
    """Which of the run's replicas this process is in, and how many there are.

    The processes of one replica train on the same samples. Under DDP each process is a replica.
    """
    share = getattr(trainer.strategy, "distributed_sampler_kwargs", None)  # a single device has none
    return (0, 1) if share is None else (int(share["rank"]), int(share["num_replicas"]))


def wrap_again(trainer: Trainer, module: LightningModule) -> None:
    """Let DDP, if that is the strategy, see anew which parameters of ``module`` take gradients."""
    strategy: Any = trainer.strategy
    if is_plain(strategy) and hasattr(strategy, "configure_ddp"):
        strategy.model = module
        strategy.configure_ddp()


class Saved:
    """Which of the ranks of a run that saved a checkpoint is this one's predecessor.

    That is the same rank in the same layout. In another layout it is the last rank of the same replica, if there are as many
    replicas: in a pipeline that one has the head. Of another number of replicas none is.

    Args:
        state: what :func:`layout` gave, in the checkpoint; {} in those of earlier versions, whose ranks are replicas.
        trainer: of this run.
        world_size: of the run that saved.

    Attributes:
        rank: the predecessor; None if there is none.
        replicas: of the run that saved.
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
    """How the processes of this run share its samples and its model, for a checkpoint."""
    return {"replicas": gather(replica(trainer)[0]), "layout": _described(trainer)}


def _described(trainer: Trainer) -> str:
    return str(getattr(trainer.strategy, "layout", ""))


def tell_other_replicas(before: int, now: int) -> None:
    """Say that a run of ``now`` replicas resumes from a checkpoint of ``before``, which is another number."""
    rank_zero_info(
        f"The checkpoint is of a run that divides its samples over {before} processes, and this run over {now}: random"
        " state and the position in the epoch are not restored, so the run will not repeat the undisturbed one."
    )
