"""What two processes run for the tests of techniques under strategies that divide a run; see :mod:`tests.strategies.launch`."""

import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_eff
from lightning_eff import HybridParallelStrategy, Rematerialization
from lightning_eff._core._architecture.technique import Architecture
from lightning_eff._core._stack.finding import candidates
from lightning_eff.strategies._hybrid.shards import whole_of
from tests.cases import case_of
from tests.models import HuggingFace, loader, module, trainer

STEPS = 12
TIMEOUT = timedelta(seconds=120)


def _hybrid(**layout: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(failure_timeout=None, timeout=TIMEOUT, **layout)


#: Strategies of two processes, by the names of layouts, and "one" for a single process.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ddp": lambda: DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT),
    "copies": lambda: _hybrid(shard=False),
    "shard": lambda: _hybrid(shard=True, min_num_params=1),
    "fsdp2": lambda: ModelParallelStrategy(
        2, 1, save_distributed_checkpoint=False, process_group_backend="gloo", timeout=TIMEOUT
    ),
    "tensor": lambda: _hybrid(tensor_parallel_size=2),
    "pipeline": lambda: _hybrid(pipeline_parallel_size=2, num_microbatches=2),
}
#: The run that a layout's must equal: it has as many replicas.
REFERENCE = {"copies": "ddp", "shard": "ddp", "fsdp2": "ddp", "tensor": "one", "pipeline": "one"}

#: In the place of a case's settings, of which the strategies refuse some.
DIVIDED = {"Rematerialization": lambda: Rematerialization(policy="sqrt")}


class Course(pl.Callback):
    """The losses of training and of validation, as a run goes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validated: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) if isinstance(outputs, dict) and "loss" in outputs else 0.0)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated.append(float(trainer.callback_metrics.get("val_loss", 0.0)))


def without_noise(model: str) -> pl.LightningModule:
    """A module of ``tests.models`` whose steps do the same on parts of a batch and in any process, with plain SGD."""
    settings: dict[str, Any] = {}
    if model in ("tiny_gpt", "short", "padded", "translator", "normed", "convolved"):
        settings = {"dropout": 0.0}
    elif model == "classifier":
        settings = {"batch_norm": False}
    net: Any = module(model, **settings)
    if model == "classifier":
        net.head[0].p = 0.0
    # AdamW would make whole steps of gradients that are zero but for rounding
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net


def shard_itself(net: Any, techniques: list[Any]) -> None:
    """Let a module divide itself by FSDP2 in ``configure_model``, as Lightning's own strategy expects.

    What changes its architecture is applied before.
    """

    def configure_model() -> None:
        if changes := [t for t in techniques if isinstance(t, Architecture)]:
            lightning_eff.apply(net, *changes)
        mesh, inner = net.device_mesh["data_parallel"], net.model if isinstance(net, HuggingFace) else net
        for stack in candidates(inner):
            for block in stack.container.children() if stack.composite else ():
                fully_shard(block, mesh=mesh)
        fully_shard(inner, mesh=mesh)

    net.configure_model = configure_model


def run(name: str, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a short run with a technique; ``""`` is a run without, on ``tiny_gpt``."""
    model = case_of(name).model if name else "tiny_gpt"
    pl.seed_everything(1, verbose=False)
    net, course = without_noise(model), Course()
    techniques = [DIVIDED.get(name, case_of(name).active)()] if name else []
    if layout == "fsdp2":
        shard_itself(net, techniques)
    pl.seed_everything(1, verbose=False)
    replicas = 1 if layout in ("one", "tensor", "pipeline") else 2
    t = trainer(
        *techniques,
        course,
        max_steps=STEPS,
        strategy=STRATEGIES[layout](),
        devices=1 if layout == "one" else 2,
        limit_val_batches=2,
        val_check_interval=3,
    )
    t.fit(net, loader(model, 20 * replicas, shuffle=False), loader(model, 8 * replicas, shuffle=False, seed=5))
    return [*course.losses, *course.validated], {k: whole_of(v).clone() for k, v in net.state_dict().items()}


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference; infinite where one has another number of values, or one that is no number."""
    if len(a) != len(b):
        return float("inf")
    apart = max((abs(x - y) / max(1.0, abs(x)) for x, y in zip(a, b, strict=True)), default=0.0)
    return apart if apart == apart else float("inf")


def all_of(pairs: list[list[str]]) -> dict[str, Any]:
    """How far each technique's run under a layout is from the run that it must equal, on any rank; or what it raised.

    Runs go on until one ends in an error on one rank alone, behind which ranks would wait for each other: the rest is missing.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    names = {(name, REFERENCE[layout]) for name, layout in pairs}
    references = {(name, "one"): run(name, "one") for name, reference in sorted(names) if reference == "one"}
    found: dict[str, Any] = {}
    for name, layout in pairs:
        key = name, REFERENCE[layout]
        if key not in references:
            references[key] = run(*key)
        losses, weights = references[key]
        mine: dict[str, Any] = {}
        print(name, layout, flush=True)
        try:
            got, held = run(name, layout)
            mine = {"loss": _apart(losses, got), "keys": sorted(weights.keys() ^ held.keys())[:3], "weights": 0.0}
            for path in weights.keys() & held.keys():
                mine["weights"] = max(
                    mine["weights"], float((weights[path].double() - held[path].double()).abs().max())
                )
        except Exception as error:
            traceback.print_exc()
            mine = {"error": f"{type(error).__name__}: {error}"}
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, mine)
        found[f"{name} {layout}"] = every
    return found
