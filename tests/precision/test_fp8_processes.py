"""Delayed scaling in two processes: ranks share their scales, under DDP and FSDP2, and resume from rank 0's checkpoint."""

import os
import socket
import subprocess
import sys
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


def _process(directory: Path) -> None:
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
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


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


def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    code = "import warnings; warnings.filterwarnings('ignore'); from pathlib import Path\n"
    code += f"from tests.precision import test_fp8_processes as t; t._process(Path({str(tmp_path)!r}))"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": "1"}
    processes, logs = [], [tmp_path / f"rank{rank}.log" for rank in range(2)]
    for rank, log in enumerate(logs):
        env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as out:
            command = [sys.executable, "-c", code]
            root = Path(__file__).parents[2]
            processes.append(subprocess.Popen(command, env=env, cwd=root, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=250) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
