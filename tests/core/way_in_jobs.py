"""What each of two processes runs for the ways in: ``python -m tests.core.way_in_jobs DIRECTORY``."""

import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

import lightning_eff as eff
from tests.core.architectures import LowRankAdapter
from tests.core.choosers import Easier, Some
from tests.core.test_samples import N, Net, Numbered
from tests.models import flat, loader, make_batch, module, trainer

TWO: dict[str, Any] = {"strategy": "ddp", "devices": 2}


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return every


def samples(root: Path) -> dict[str, Any]:
    """What each rank sees of chosen epochs, under samplers of Lightning's and the user's own, and after resumes."""
    found: dict[str, Any] = {}
    rank = int(os.environ["RANK"])

    def own() -> DataLoader[Any]:
        data = Numbered()
        return DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank, shuffle=True, drop_last=True))

    loaders = {
        "shuffle": lambda: DataLoader(Numbered(), 4, shuffle=True),
        "workers": lambda: DataLoader(Numbered(), 4, shuffle=True, num_workers=1, persistent_workers=True),
        "own sampler, drop_last": own,
    }
    for kind, build in loaders.items():
        settings: dict[str, Any] = {**TWO, "use_distributed_sampler": "own" not in kind, "max_steps": 9}
        for technique in [Easier()] if kind == "workers" else [Some(0.6)]:
            name = f"{kind}, {type(technique).__name__}"
            pl.seed_everything(5, verbose=False)
            net, saver = Net(), ModelCheckpoint(root / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
            trainer(technique, saver, **settings, enable_checkpointing=True).fit(net, build())
            torch.distributed.barrier()
            again = {}
            for step in (net.bars[0], 7):
                pl.seed_everything(6, verbose=False)
                resumed = Net()
                path = root / name / f"step={step}.ckpt"
                trainer(type(technique)(), **settings).fit(resumed, build(), ckpt_path=path)
                again[step] = resumed.seen == net.seen[step:] and torch.equal(flat(resumed), flat(net))
            epochs = [e.order.tolist() for e in technique.epochs] if isinstance(technique, Some) else []
            found[name] = gathered(
                {"seen": net.seen, "bars": net.bars, "again": list(again.values()), "orders": epochs}
            )
    return found


def sharded(root: Path) -> dict[str, Any]:
    """An adapter under HybridParallelStrategy, whose blocks are divided: its checkpoint loads into ``apply(plain)``."""
    found: dict[str, Any] = {}
    arguments: dict[str, dict[str, Any]] = {
        "data": {"data_parallel_size": 2, "min_num_params": 0},
        "tensor": {"tensor_parallel_size": 2},
        "pipeline": {"pipeline_parallel_size": 2},
    }
    batch = make_batch("tiny_gpt")["input_ids"]
    for name, sizes in arguments.items():
        try:
            pl.seed_everything(1, verbose=False)
            net = module("tiny_gpt", dropout=0.0)
            saver = ModelCheckpoint(root / name, every_n_train_steps=3, filename="{step}")
            settings: dict[str, Any] = {"devices": 2, "max_steps": 3, "enable_checkpointing": True}
            t = trainer(LowRankAdapter(), saver, strategy=eff.HybridParallelStrategy(**sizes), **settings)
            t.fit(net, loader("tiny_gpt", 40))
            path = root / name / "step=3.ckpt"
            torch.distributed.barrier()
            pl.seed_everything(1, verbose=False)
            plain = eff.apply(module("tiny_gpt", dropout=0.0), LowRankAdapter())
            began = flat(plain).clone()
            plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
            whole, exported = eff.export(net).eval(), eff.export(plain).eval()
            with torch.no_grad():
                apart = [float((m(batch) - plain.eval()(batch)).abs().max()) for m in (whole, exported)]
            ups = [float(m.up.abs().max()) for m in plain.modules() if hasattr(m, "up")]
            found[name] = {"apart": max(apart), "moved": float((flat(plain) - began).abs().max()), "ups": min(ups)}
        except ValueError as error:
            found[name] = {"refused": str(error)}
        found[name] = gathered(found[name])
    return found


class EncoderBlock(torch.nn.Module):
    """torch's own layer, in a module of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def scaled() -> dict[str, float]:
    """By how much gradients of scaled branches that ``fully_shard`` divided differ from those of the whole module."""
    from torch.distributed.fsdp import fully_shard

    apart, scales = list[float](), list[float]()
    for alpha in (0.0, 0.5):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), EncoderBlock(), EncoderBlock())
        eff.apply(net, eff.SkipInit(alpha=alpha))
        x = torch.randn(2, 3, 4)
        net(x).square().sum().backward()
        whole: list[Any] = [p.grad for p in net.parameters()]
        net.zero_grad()
        for block in [*net][1:]:
            fully_shard(block)
        fully_shard(net)
        net(x).square().sum().backward()
        parts: list[Any] = [p.grad for p in net.parameters()]
        apart += [float((a - b.full_tensor()).abs().max()) for a, b in zip(whole, parts, strict=True)]
        scales += [float(b.full_tensor().abs().max()) for b in parts if b.numel() == 1]
    return {"apart": max(apart), "scales": min(scales)}


def divided_before(root: Path) -> list[str]:
    """What is said where the user's ``configure_model`` divides the module itself, before the technique can change it."""
    from torch.distributed.fsdp import fully_shard

    told: list[str] = []
    for technique, name in (
        (LowRankAdapter(), "classifier"),
        (eff.LayerScale(), "tiny_gpt"),
        (eff.QKNorm(), "tiny_gpt"),
    ):
        net: Any = module(name)
        part = net if name == "tiny_gpt" else net.head
        net.configure_model = partial(
            lambda net, part: fully_shard(part, mesh=net.device_mesh["data_parallel"]), net, part
        )
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        try:
            trainer(technique, strategy=strategy, devices=2, max_steps=2).fit(net, loader(name))
            told.append("not refused")
        except ValueError as error:
            told.append(str(error))
    return told


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    result = {
        "samples": samples(root),
        "sharded": sharded(root),
        "divided": divided_before(root),
        "N": N,
        "scaled": scaled(),
    }
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
