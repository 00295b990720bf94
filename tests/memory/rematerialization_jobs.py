"""What two processes run of rematerialisation: ``python -m tests.memory.rematerialization_jobs DIRECTORY``."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.memory.test_recomputation import PLANS, Chain, Residual, following
from tests.memory.test_rematerialization import POLICIES
from tests.runs import differences, final_state, fit


def main() -> None:
    """One of two: plain and rematerialised runs end with the same weights on both ranks."""
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40, "max_steps": 2}
    plain = final_state(*fit("tiny_gpt", list, **settings))
    for policy, build in POLICIES.items():
        technique = build()
        found = final_state(*fit("tiny_gpt", lambda: [technique], **settings))  # noqa: B023
        assert differences(plain, found) == [], policy
        plans: list[Any] = [None, None]
        torch.distributed.all_gather_object(plans, technique.plan)
        assert plans[0] == plans[1], policy
    _sharded()


def _sharded() -> None:
    """Blocks whose parameters FSDP2 gathers for each run, out of turn too."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = Chain([Residual(8) for _ in range(6)])
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    x = torch.randn(16, 8) + torch.distributed.get_rank()
    net.training_step = lambda batch, _: F.dropout(net(batch), 0.2).square().mean()

    def gradients() -> dict[str, Tensor]:
        net.zero_grad()
        torch.manual_seed(1)
        net.training_step(x, 0).backward()
        return {name: p.grad.full_tensor() for name, p in net.named_parameters()}

    expected = gradients()
    for name in ("full", "quadratic"):
        with following(net, PLANS[name]) as engine:
            assert differences(expected, gradients()) == [], name
            assert engine.reruns > 0


if __name__ == "__main__":
    main()
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "result.json").write_text("true")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
