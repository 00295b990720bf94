"""What two processes run of averages of weights that they divide, and the single process that they are compared with."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_eff import ExponentialMovingAverage, HybridParallelStrategy
from tests.models import flat, module
from tests.strategies.hybrid_jobs import averaged, fit

STRATEGIES: dict[str, tuple[type[ModelParallelStrategy], dict[str, Any]]] = {
    "fsdp2": (ModelParallelStrategy, {"data_parallel_size": 2, "tensor_parallel_size": 1}),
    "hybrid": (HybridParallelStrategy, {"data_parallel_size": 2, "min_num_params": 0}),
    "tensor": (HybridParallelStrategy, {"tensor_parallel_size": 2}),
    "pipeline": (HybridParallelStrategy, {"pipeline_parallel_size": 2}),
}

LAYOUTS = ["fsdp2", "hybrid+"]  # those that are always run, with + for a folder of pieces


def build() -> ExponentialMovingAverage:
    return ExponentialMovingAverage(2.0, tail=0.9, exclude=["position.*"])


def run(directory: Path, strategy: Any = "auto", devices: int = 1, resume: Path | None = None) -> dict[str, Any]:
    """Seven steps with a validation and a checkpoint of the average after the fourth; what is left, in plain containers."""
    pl.seed_everything(3 if resume is None else 4, verbose=False)
    net = module("tiny_gpt", dropout=0.0, num_layers=2)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.3, momentum=0.5)  # type: ignore[method-assign]
    if type(strategy) is ModelParallelStrategy:
        net.configure_model = lambda: _shard(net)  # type: ignore[method-assign]
    saver = ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    technique = build()
    _, t = fit(
        net,
        "tiny_gpt",
        strategy,
        devices=devices,
        batch_size=8,
        steps=7,
        callbacks=(technique, saver),
        val_check_interval=4,
        limit_val_batches=1,
        enable_checkpointing=True,
        ckpt_path=resume,  # type: ignore[arg-type]
    )
    whole = nn.ParameterList(p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "weights": flat(whole).tolist(),
        "val_loss": averaged([float(t.callback_metrics["val_loss"])]) if resume is None else [],
        "steps": technique.report()["averaged_steps"],
    }


def _shard(net: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block, mesh=net.device_mesh["data_parallel"])
    fully_shard(net, mesh=net.device_mesh["data_parallel"])


def divided(root: str, names: list[str]) -> dict[str, Any]:
    """By name of a layout: what its run leaves, also after a resume."""
    found: dict[str, Any] = {}
    for name in names:
        cls, sizes = STRATEGIES[name.rstrip("+")]
        directory, settings = Path(root, name), {**sizes, "save_distributed_checkpoint": name.endswith("+")}
        whole = run(directory, cls(**settings), 2)
        again = run(directory, cls(**settings), 2, resume=directory / "step=4.ckpt")
        found[name] = {**whole, "again": again["weights"] == whole["weights"] and again["steps"] == whole["steps"]}
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, found[name])
        found[name]["alike"] = every[0] == every[1]
    net = module("classifier")
    try:
        strategy = HybridParallelStrategy(data_parallel_size=2)
        technique = ExponentialMovingAverage(2.0, batch_norm="recompute")
        fit(net, "classifier", strategy, devices=2, batch_size=8, steps=1, callbacks=(technique,))
    except ValueError as error:
        found["refused"] = str(error)
    return found
