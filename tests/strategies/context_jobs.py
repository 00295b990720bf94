"""What the processes of the context-parallel tests run, and the single process that they are compared with."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_eff.strategies._context.messages import Share
from tests.strategies.context_models import Rotary
from tests.strategies.hybrid_jobs import Settings, everywhere, fit, made, observe_logs, strategy_of, values
from tests.strategies.resume_jobs import resume_from_every_batch

_HAND_WRITTEN = "rotary"


def build(case: Settings) -> pl.LightningModule:
    """The module of a case with first weights that are always the same."""
    if case["model"] != _HAND_WRITTEN:
        return made(case["model"], **case.get("module", {}))
    pl.seed_everything(1, verbose=False)
    return Rotary(**case.get("module", {}))


def train(case: Settings, *callbacks: pl.Callback) -> tuple[list[float], pl.LightningModule, pl.Trainer]:
    """Fit as ``case`` says: "model", "module" (its arguments), "strategy" (settings or a name), "devices", "steps", "padded",
    "fit" (of the Trainer)."""
    model, strategy = build(case), case["strategy"]
    if isinstance(strategy, dict):
        strategy = strategy_of(strategy)
        if int(os.environ["RANK"]):
            with torch.no_grad():  # other ranks' first weights must not count
                for p in model.parameters():
                    p.add_(0.1)
    data = "tiny_gpt" if case["model"] == _HAND_WRITTEN else case["model"]
    losses, run = fit(
        model,
        data,
        strategy,
        devices=case["devices"],
        batch_size=case.get("batch_size", 4),
        steps=case.get("steps", 4),
        samples=16,
        callbacks=callbacks,
        padded=case.get("padded", False),
        **case.get("fit", {}),
    )
    return losses, model, run


class Gathers:
    """Counts the hidden states that ranks gather."""

    def __init__(self) -> None:
        self.count, self._gathered = 0, Share.gathered

    def __enter__(self) -> "Gathers":
        def gathered(share: Share, part: Tensor, dim: int) -> Tensor:
            self.count += 1
            return self._gathered(share, part, dim)

        Share.gathered = gathered  # pyright: ignore[reportAttributeAccessIssue] - its name for the object
        return self

    def __exit__(self, *error: object) -> None:
        Share.gathered = self._gathered


class Kept(pl.Callback):
    """Bytes that the blocks keep for the backward pass of a step, without parameters."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        for block in pl_module.get_submodule("blocks").children():
            around = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            block.register_forward_pre_hook(lambda *_, around=around: around.__enter__())
            block.register_forward_hook(lambda *_, around=around: around.__exit__(None, None, None))


def kept(strategy: Settings) -> int:
    """Bytes that the blocks keep for four sequences."""
    callback, sharing = Kept(), "context_parallel_size" in strategy
    size = 4 if sharing else 4 * torch.distributed.get_world_size()
    given = {"model": "rotary", "strategy": {**strategy, "shard": False}, "devices": 2, "steps": 1, "batch_size": size}
    train(given, callback)
    return sum(callback.storages.values())


class Dropped(pl.Callback):
    """Which features the first block drops in a step."""

    def __init__(self) -> None:
        self.zeros: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def look(drop: nn.Module, args: Any, output: Tensor) -> None:
            self.zeros = (output == 0).flatten().tolist()

        pl_module.get_submodule("blocks.0.drop").register_forward_hook(look)


def everything(directory: str, given: dict[str, Settings]) -> dict[str, Any]:
    """What the tests look at, of one start of processes.

    Returns:
        "cases": each case's losses, weights and number of gathers, or the message of its refusal; "resumed": differences of
        resumed runs; "bytes": kept without and with division; "dropped": each rank's dropped features; "random": each rank's
        random state after a run; "logs": what each rank logs.
    """
    two = {"context_parallel_size": 2}
    found: dict[str, Any] = {}
    for name, case in given.items():
        try:
            with Gathers() as gathers:
                losses, model, _ = train(case)
            weights = {key: value.tolist() for key, value in values(model).items()}
            found[name] = {"losses": losses, "weights": weights, "gathers": gathers.count}
        except (ValueError, MemoryError) as error:
            found[name] = str(error)
    once = {"saved": [2, 4], "batches": [4]}
    shards, copies = {"strategy": two, **once}, {"strategy": {**two, "shard": False}, **once}
    resumed = resume_from_every_batch(directory, {"shards": shards, "replicas": copies})
    dropped = Dropped()
    train({"model": "rotary", "module": {"dropout": 0.5}, "strategy": two, "devices": 2, "steps": 1}, dropped)
    return {
        "cases": found,
        "resumed": resumed,
        "bytes": [kept({}), kept(two)],
        "dropped": everywhere(dropped.zeros),
        "random": everywhere(torch.get_rng_state().tolist()),
        "logs": observe_logs(strategy_of(two), 2),
    }
