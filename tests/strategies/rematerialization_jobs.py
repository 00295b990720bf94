"""What two processes run for the tests of rematerialisation under the hybrid strategy; see :mod:`tests.strategies.launch`."""

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_eff import HybridParallelStrategy, Rematerialization
from tests.models import loader, module, trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"shard": False},
    "shards": {"shard": True, "min_num_params": 1},
    "1F1B": {"pipeline_parallel_size": 2},
    "ZBVZeroBubble": {"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"},
}


def all_layouts() -> dict[str, Any]:
    """The losses of three steps under each layout and policy, or what the fit raised."""
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        for policy in (None, "full", "sqrt", "selective", "optimal"):
            budget = 0.7 if policy == "optimal" else None
            techniques = [] if policy is None else [Rematerialization(policy=policy, memory_budget=budget)]  # type: ignore[arg-type]
            found[f"{name} {policy}"] = _run(layout, techniques)
    return found


def _run(layout: dict[str, Any], techniques: list[Any]) -> list[float] | str:
    class Losses(pl.Callback):
        seen: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            self.seen.append(float(trainer.callback_metrics["train_loss"]))

    pl.seed_everything(1, verbose=False)
    losses = Losses()
    losses.seen = []
    strategy = HybridParallelStrategy(failure_timeout=None, **layout)
    t = trainer(*techniques, losses, max_steps=3, strategy=strategy, devices=2)
    error: str | None = None
    try:
        t.fit(module("tiny_gpt", dropout=0.0), loader("tiny_gpt", 16, shuffle=False))
    except ValueError as e:  # anything else is a defect, and fails the job
        error = str(e)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, error)
    assert told[0] == told[1], told
    return losses.seen if error is None else error
