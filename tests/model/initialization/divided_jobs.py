"""What two processes run of techniques that set weights once, under strategies that divide them, and one process alone."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_eff import LSUV, DataDrivenInit, MetaInit, OrthogonalInit, TFixup, ZerO, ZeroProjections
from lightning_eff._core.technique import Technique
from tests.models import TinyGPT, hugging_face, trainer
from tests.strategies.hybrid_jobs import Ordered, SaveAt, strategy_of

#: by what the network is made of
BY_STRUCTURE: dict[str, Callable[[], Technique]] = {
    "OrthogonalInit": lambda: OrthogonalInit(gain=1.5),
    "ZerO": ZerO,
    "TFixup": TFixup,
    "TFixup, scaled": lambda: TFixup(draw=False),
    "ZeroProjections": ZeroProjections,
    "ZeroProjections, scaled": lambda: ZeroProjections(scale=0.25),
}
#: by what it computes of the data
BY_DATA: dict[str, Callable[[], Technique]] = {
    "LSUV": LSUV,
    "DataDrivenInit": lambda: DataDrivenInit(batches=2),
    "MetaInit": lambda: MetaInit(steps=2, lr=0.01, batches=1),
}
MODELS: dict[str, Callable[[], Any]] = {
    "tiny_gpt": lambda: TinyGPT(2, dropout=0.0),
    "gpt2": lambda: hugging_face("gpt2", 2),
}


def _sharding(m: Any) -> Any:
    """The module as a user of FSDP2 writes it: it divides its own blocks."""

    def configure_model() -> None:
        inner = m if isinstance(m, TinyGPT) else m.model
        blocks = inner.blocks if isinstance(m, TinyGPT) else inner.transformer.h
        for block in blocks:
            fully_shard(block, mesh=m.device_mesh["data_parallel"])
        if inner is not m:
            fully_shard(inner, mesh=m.device_mesh["data_parallel"])

    m.configure_model = configure_model
    return m


def _fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


class Weights(pl.Callback):
    """The weights at the end, whole, wherever they were."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state: Any = trainer.strategy.lightning_module_state_dict()
        self.found = {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone() for name, t in state.items()
        }


def begun(model: str, technique: Technique, strategy: Any, *, devices: int, kind: str = "", **further: Any) -> Any:
    """The weights after a step at a rate of zero."""
    torch.manual_seed(0)
    if kind == "meta":
        with torch.device("meta"):
            m = MODELS[model]()
    else:
        m = MODELS[model]()
    if kind == "own":
        m = _sharding(m)
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)
    weights = Weights()
    pl.seed_everything(7, verbose=False)  # which processes that are started take up, too
    run = trainer(technique, weights, strategy=strategy, devices=devices, max_steps=1, max_epochs=-1, **further)
    run.fit(m, datamodule=Ordered(model, 16, 4))
    return weights.found, technique.report()["numbers"]


def alone(model: str, technique: Technique) -> Any:
    """The same in this process by itself."""
    return begun(model, technique, "auto", devices=1)


def _trained(technique: Technique | None, *, steps: int, resume: str | None = None, save: str | None = None) -> Any:
    """The weights of TinyGPT after some steps on two processes."""
    torch.manual_seed(0)
    m, weights = TinyGPT(2, dropout=0.0), Weights()
    callbacks = [weights, *([technique] if technique else []), *([SaveAt(1, save)] if save else [])]
    run = trainer(*callbacks, strategy=strategy_of({}), devices=2, max_steps=steps, max_epochs=-1)
    run.fit(m, datamodule=Ordered("tiny_gpt", 16, 4), ckpt_path=resume)
    return weights.found


def resumed(directory: str) -> dict[str, Any]:
    """Whether a run that goes on from a checkpoint ends as the undisturbed one, and what others do with one of a plain run."""
    whole = _trained(OrthogonalInit(), steps=3, save=f"{directory}/ours.ckpt")
    again = OrthogonalInit()
    went_on = _trained(again, steps=3, resume=f"{directory}/ours.ckpt")
    _trained(None, steps=3, save=f"{directory}/plain.ckpt")
    plain = _trained(None, steps=3, resume=f"{directory}/plain.ckpt")
    left = _trained(OrthogonalInit(), steps=3, resume=f"{directory}/plain.ckpt")
    refused = ""
    try:
        _trained(OrthogonalInit(force=True), steps=3, resume=f"{directory}/plain.ckpt")
    except ValueError as error:
        refused = str(error)
    same = lambda a, b: all(torch.equal(a[name], b[name]) for name in a)  # noqa: E731
    return {
        "went on": same(whole, went_on),
        "left": same(plain, left),
        "apart": not same(whole, plain),
        "numbers": again.report()["numbers"],
        "refused": refused,
    }


LAYOUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "hybrid": (lambda: strategy_of({}), ""),
    "hybrid, on meta": (lambda: strategy_of({"init_on": "meta"}), "meta"),
    "pipeline": (lambda: strategy_of({"pipeline_parallel_size": 2}), ""),
    "tensor": (lambda: strategy_of({"tensor_parallel_size": 2}), ""),
    "fsdp2 of its own": (_fsdp2, "own"),
}


def layouts(model: str, directory: str) -> dict[str, Any]:
    """By layout and technique: what differs from one process; and what those say that refuse."""
    expected = torch.load(f"{directory}/{model}.pt", weights_only=True)
    plain = expected["plain"]
    found: dict[str, Any] = {}
    for layout, (strategy, kind) in LAYOUTS.items():
        for name, build in {**BY_STRUCTURE, **BY_DATA}.items():
            if name in BY_DATA and layout == "hybrid":
                continue  # each replica's batch is another than one process's
            try:
                weights, numbers = begun(model, build(), strategy(), devices=2, kind=kind)
            except ValueError as refused:
                found[f"{layout}: {name}"] = str(refused)
                continue
            whole, expected_numbers = expected[name]
            apart = sorted(
                key
                for key, value in whole.items()
                if key in weights
                and not torch.equal(weights[key], value)
                and not (kind == "meta" and ("scaled" in name or torch.equal(value, plain[key])))  # another's draw
            )
            found[f"{layout}: {name}"] = [apart, numbers == expected_numbers, len(weights) == len(whole)]
    return found
