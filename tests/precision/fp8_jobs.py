"""What two processes run of delayed scaling: ``python -m tests.precision.fp8_jobs DIRECTORY CHECKPOINTS``."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.models import TinyGPT, flat, loader, trainer
from tests.precision.test_fp8_history import Watched, plugin, resuming, rows
from tests.runs import checkpoints, differences, final_state, fit


class Sharded(TinyGPT):
    """Its blocks and the rest are sharded by FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None and self.blocks is not None
        if isinstance(self.norm.weight, torch.distributed.tensor.DTensor):
            return
        for block in self.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])


def _everywhere(value: Tensor) -> list[Tensor]:
    others = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, value.contiguous())
    return others


def main(directory: Path) -> None:
    """One of two: what the ranks' histories are, under DDP and FSDP2."""
    rank = int(os.environ["RANK"])
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40, "max_steps": 6}
    net, t = fit("tiny_gpt", resuming, directory=directory, plugins=[p := plugin()], **settings)
    first, second = _everywhere(flat(net))
    assert torch.equal(first, second), "ranks diverge"
    first, second = _everywhere(p.state_dict()["history"]["amax"])
    assert torch.equal(first, second) and (first > 0).all(), "ranks have histories of their own"
    whole = final_state(net, t)
    torch.distributed.barrier()
    path = checkpoints(directory)[2]  # rank 0's
    assert (
        differences(whole, final_state(*fit("tiny_gpt", resuming, resume=path, plugins=[plugin()], **settings))) == []
    )
    torch.manual_seed(0)
    watched, p = Watched(), plugin()
    data = torch.randn(3, 4, 8) * (1 + 2 * rank)
    trainer(max_steps=3, plugins=[p], strategy="ddp", devices=2, use_distributed_sampler=False).fit(watched, data)
    largest = [float(max(pair)) for pair in zip(*_everywhere(torch.tensor(watched.seen)), strict=True)]
    assert rows(p, "blocks.0")[0] == largest[::-1], "the largest of both ranks"
    _sharded()


def _sharded() -> None:
    weights = {}
    for name, strategy in {
        "ddp": lambda: "ddp",
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }.items():
        pl.seed_everything(3, verbose=False)
        net = (Sharded if name == "fsdp2" else TinyGPT)(num_layers=2, dropout=0.0, lr=1e-3)
        p = plugin()
        trainer(max_steps=4, plugins=[p], strategy=strategy(), devices=2).fit(net, loader("tiny_gpt", 40))
        values = [q.full_tensor() if hasattr(q, "full_tensor") else q for q in net.parameters()]
        weights[name] = torch.cat([q.detach().flatten() for q in values])
        assert (p.state_dict()["history"]["amax"][:, :3] > 0).all()
    apart = float((weights["ddp"] - weights["fsdp2"]).norm() / weights["ddp"].norm())
    assert apart < 1e-4, apart


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[2]))
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "result.json").write_text("true")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
