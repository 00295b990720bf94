"""What the processes of the test of unusual modules run: each module in one layout, and in one process alone."""

import logging
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff
from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
from lightning_eff.strategies.di_lo_co import DiLoCo
from lightning_eff.strategies.drop_slowest import DropSlowest
from lightning_eff.strategies.dynamic_averaging import DynamicAveraging
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from lightning_eff.strategies.joint_spar import JointSpar
from lightning_eff.strategies.local_sgd import LocalSGD
from lightning_eff.strategies.res_ist import ResIST
from tests.models import trainer
from tests.runs import largest
from tests.strategies.kinds import CLASSES, KINDS, LENGTH, VOCAB

BATCH, BATCHES = 8, 6
#: Arguments of HybridParallelStrategy; None for Lightning's own DDP.
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "replicas": {"shard": False},
    "shards": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def _loader(ranks: int, rank: int) -> DataLoader[Any]:
    tokens = torch.randint(0, VOCAB, (BATCH * BATCHES, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = [list(range(i * BATCH + rank, (i + 1) * BATCH, ranks)) for i in range(BATCHES)]
    return DataLoader(TensorDataset(tokens, tokens.sum(1) % CLASSES), batch_sampler=batches)


class Outputs(pl.Callback):
    """What validation steps return; and a checkpoint at the end of training."""

    def __init__(self, file: str) -> None:
        self.file, self.logits = file, list[Tensor]()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.file)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        self.logits.append(outputs["logits"].detach().clone())


def _run(name: str, layout: str | None, file: str) -> dict[str, Any]:
    """Train a module; its weights, what it logs, returns and saves. Rank 0's are whole."""
    kind = KINDS[name]
    ranks = 2 if layout in ("ddp", "replicas", "shards") else 1
    rank = int(os.environ["RANK"]) if ranks > 1 else 0
    pl.seed_everything(3, verbose=False)
    module, outputs = kind.make(), Outputs(file)
    techniques = [getattr(lightning_eff, technique)(**given) for technique, given in kind.callbacks.items()]
    strategy: Any = "auto"
    if layout is not None:
        sizes = LAYOUTS[layout]
        strategy = "ddp" if sizes is None else HybridParallelStrategy(failure_timeout=60.0, **sizes)
    run = trainer(
        *techniques,
        outputs,
        strategy=strategy,
        devices=1 if layout is None else 2,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        limit_val_batches=2,
        use_distributed_sampler=False,
    )
    run.fit(module, _loader(ranks, rank), _loader(ranks, rank))
    logits = torch.cat(outputs.logits)
    if ranks > 1:
        parts = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(parts, logits.contiguous())
        logits = torch.stack(parts, 1).flatten(0, 1)
    saved = torch.load(file, weights_only=True) if os.environ["RANK"] == "0" else {}
    logged = {key: float(value) for key, value in run.callback_metrics.items() if not key.startswith("eff/")}
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    return {"weights": weights, "logged": logged, "logits": logits, "saved": saved}


def alone(folder: str, names: list[str]) -> dict[str, Any]:
    """Each module in one process, its findings left in a folder."""
    _quiet()
    for name in names:
        print(name, flush=True)
        found = _run(name, None, f"{folder}/{name}.ckpt")
        torch.save(found, f"{folder}/{name}.pt")
    return {"names": names}


def _apart(a: Any, b: Any) -> float:
    if a.numel() == 0:
        return 0.0
    return float((a.detach().to(torch.complex128) - b.detach().to(torch.complex128)).abs().max())


def _compare(name: str, layout: str, folder: str) -> dict[str, Any]:
    found = _run(name, layout, f"{folder}/{name}_{layout}.ckpt")
    reference = torch.load(f"{folder}/{name}.pt", weights_only=True)
    weights, whole = found["weights"], reference["weights"]
    assert list(weights) == list(whole), "names"
    rest = {"logged": largest(abs(found["logged"][k] - v) for k, v in reference["logged"].items())}
    assert found["logged"].keys() == reference["logged"].keys(), "logged names"
    result = {
        **rest,
        "weights": largest(_apart(weights[key], whole[key]) for key in whole),
        "logits": _apart(found["logits"], reference["logits"]),
    }
    if dist.get_rank() == 0:
        saved, other = found["saved"], reference["saved"]
        plain = KINDS[name].make()
        if not KINDS[name].callbacks:
            plain.load_state_dict(saved["state_dict"], strict=True)
        result["saved"] = largest(_apart(saved["state_dict"][key], whole[key]) for key in whole)
        states = [s["optimizer_states"][0]["state"] for s in (saved, other)]
        assert states[0].keys() == states[1].keys(), "ids of optimizer states"
        momenta = (
            (states[0][i]["momentum_buffer"], m)
            for i in states[1]
            if (m := states[1][i].get("momentum_buffer")) is not None
        )
        result["momenta"] = largest([0.0, *(_apart(a, b) for a, b in momenta)])
    return result


def divided(folder: str, layout: str, names: list[str]) -> dict[str, Any]:
    """Each module in one layout: how far all ranks are from one process at most, or how it is refused."""
    _quiet()
    results: dict[str, Any] = {}
    for name in names:
        try:
            mine = _compare(name, layout, folder)
        except ValueError as error:
            mine = {"refused": str(error)}
        except Exception as error:
            mine = {"crashed": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        results[name] = ranks[0]
        failed = next((r for key in ("crashed", "refused") for r in ranks if key in r), None)
        if failed is not None and not all("refused" in r for r in ranks):
            failed = {"crashed": f"not on all ranks alike: {ranks}"}
        results[name] = failed or {key: largest(r[key] for r in ranks if key in r) for key in ranks[0]}
    return results


def _steps(strategy: Any, *techniques: Any) -> dict[str, Tensor]:
    """Four SGD steps of parameters of all kinds under DDP, and the same weights on all ranks; their values."""
    pl.seed_everything(3, verbose=False)
    module: Any = KINDS["Everything"].make()
    module.synced = False
    run = trainer(*techniques, strategy=strategy, devices=2, max_steps=4, use_distributed_sampler=False)
    run.fit(module, _loader(2, int(os.environ["RANK"])))
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    ranks: list[Any] = [None] * 2
    dist.all_gather_object(ranks, values)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in values), "ranks hold different weights"
    return values


class Every(JointSpar):
    """Each layer is drawn with a probability of 1."""

    def on_optimizers(self, session: Any) -> None:
        super().on_optimizers(session)
        self._p = torch.ones(len(self._layers), dtype=torch.float64)


# name -> what it is, and whether it computes what DDP does, but for rounding
TECHNIQUES: dict[str, tuple[Callable[[], tuple[Any, ...]], bool]] = {
    "powersgd of full rank": (
        lambda: (CompressedDDPStrategy("powersgd", rank=64, start_step=0, min_compression_rate=0.01),),
        True,
    ),
    "powersgd": (lambda: (CompressedDDPStrategy("powersgd", rank=1, start_step=1, min_compression_rate=1.0),), False),
    "bf16": (lambda: (CompressedDDPStrategy("bf16"),), False),
    "onebit": (lambda: (CompressedDDPStrategy("onebit", start_step=1),), False),
    "qsgd": (lambda: (CompressedDDPStrategy("qsgd", bits=8, bucket_size=16),), False),
    "LocalSGD": (lambda: ("ddp", LocalSGD(interval=1, warmup_steps=1)), True),
    "DiLoCo that averages": (
        lambda: ("ddp", DiLoCo(interval=1, warmup_steps=1, outer_lr=1.0, outer_momentum=0.0)),
        True,
    ),
    "DiLoCo": (lambda: ("ddp", DiLoCo(interval=2, outer_dtype="int8")), False),
    "DynamicAveraging": (lambda: ("ddp", DynamicAveraging(0.0, interval=1, warmup_steps=1)), True),
    "ResIST": (lambda: ("ddp", ResIST(interval=2)), False),
    "DropSlowest": (lambda: ("ddp", DropSlowest(grace=50.0)), True),
    "JointSpar": (lambda: ("ddp", JointSpar(share=0.6)), False),
    "JointSpar of every layer": (lambda: ("ddp", Every(share=0.5, rate=0.0)), True),
}


def communication() -> dict[str, Any]:
    """How far each technique's weights are from DDP's at most, and of complex ones real and imaginary parts."""
    _quiet()
    plain, results = _steps("ddp"), dict[str, Any]()
    first = {name: p.detach() for name, p in _first().named_parameters()}
    for name, (make, _) in TECHNIQUES.items():
        try:
            strategy, *techniques = make()
            values = _steps(strategy, *techniques)
            still = [
                f"{key}.{part}"
                for key, value in values.items()
                for part in (("real", "imag") if value.is_complex() else ("real",))
                if value.numel() and torch.equal(getattr(value, part), getattr(first[key], part))
            ]
            results[name] = {"apart": largest(_apart(values[key], plain[key]) for key in plain), "still": still}
        except Exception as error:
            results[name] = {"crashed": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"}
    return results


def _first() -> pl.LightningModule:
    pl.seed_everything(3, verbose=False)
    return KINDS["Everything"].make()


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
