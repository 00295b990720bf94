"""What two processes run for the tests of Muon, SOAP and Shampoo; see :mod:`tests.optim.optim_jobs`."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_eff import HybridParallelStrategy
from lightning_eff.optim.optimizers import muon
from lightning_eff.optim.optimizers.low_rank.ga_lore import GaLore
from lightning_eff.optim.optimizers.muon import Muon
from lightning_eff.optim.optimizers.shampoo import Shampoo
from lightning_eff.optim.optimizers.soap import SOAP
from tests.models import flat, make_batch, module
from tests.strategies.hybrid_jobs import fit


def all_of_them() -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {
        "ddp": ddp(),
        "apart": apart(),
        "fsdp2": fsdp2(),
        "two_sided": two_sided(),
        "hybrid": {name: hybrid({"tensor_parallel_size": 2}, name) for name in HYBRID},
    }


def _net() -> nn.Module:
    torch.manual_seed(3)
    return module("tiny_gpt", dropout=0.0)


def _gathered(x: Tensor) -> list[Tensor]:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return every


def _trained(net: nn.Module, step: nn.Module, optimizer: torch.optim.Optimizer, same: bool) -> Tensor:
    for i in range(4):
        optimizer.zero_grad()
        step(make_batch("tiny_gpt", seed=i if same else 10 * dist.get_rank() + i), 0).backward()
        optimizer.step()
    return flat(net)


class _Step(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any, index: int) -> Tensor:
        return self.net.training_step(batch, index)


def ddp() -> dict[str, Any]:
    made: list[int] = []
    original = muon.orthogonalize

    def counting(matrices: list[Tensor], **kwargs: Any) -> list[Tensor]:
        made.append(len(matrices))
        return original(matrices, **kwargs)

    muon.orthogonalize = counting
    try:
        net = _net()
        net.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        here = _trained(net, DistributedDataParallel(_Step(net)), Muon(net, normalization="neuron"), same=False)
        shares = made[-1]
    finally:
        muon.orthogonalize = original
    # one process that steps with the mean gradient of both, found by the same all-reduce
    alone = _net()
    alone.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    wrapped = DistributedDataParallel(_Step(alone))
    expected = _trained(alone, wrapped, Muon(alone, normalization="neuron", distributed=False), same=False)
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, shares)
    return {
        "same_as_one_process": torch.equal(here, expected),
        "alike": all(torch.equal(one, here) for one in _gathered(here)),
        "here": counts,
    }


def two_sided() -> dict[str, Any]:
    """SOAP and Shampoo on averaged gradients of whole parameters, and what GaLore says of parameters in pieces."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    for cls in (SOAP, Shampoo):
        net = _net()
        net.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        optimizer: Any = cls(net, lr=0.01)
        start = flat(net)
        here = _trained(net, DistributedDataParallel(_Step(net)), optimizer, same=False)
        alike = all(torch.equal(one, here) for one in _gathered(here))
        found[cls.__name__] = {"alike": alike, "moved": not torch.equal(start, here)}
    sharded = _net()
    fully_shard(sharded)
    try:
        GaLore(sharded, rank=4)
        found["refused"] = ""
    except ValueError as error:
        found["refused"] = str(error)
    return found


def apart() -> dict[str, Any]:
    """No rank averages: after two steps on equal batches, each goes its own way.

    And nobody hangs on a NaN on one rank, nor where one has no gradient of a matrix, as a stage of a pipeline whose blocks
    are frozen.
    """

    def run(distributed: bool) -> Tensor:
        net = _net()
        net.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        optimizer = Muon(net, distributed=distributed)
        _trained(net, _Step(net), optimizer, same=True)
        return _trained(net, _Step(net), optimizer, same=False)

    here, expected = run(True), run(False)
    p = nn.Parameter(torch.randn(8, 8))
    optimizer = Muon([p])
    for _ in range(3):
        p.grad = torch.full((8, 8), float("nan") if dist.get_rank() else 1.0)
        optimizer.step()
    return {
        "same_as_alone": torch.equal(here, expected),
        "alike": all(torch.equal(one, here) for one in _gathered(here)),
        "nan_is_finished": True,
        "one_that_has_none": _one_that_has_none(),
    }


def _one_that_has_none() -> list[bool]:
    """Whether each rank ends where it does alone; the second has nothing to make orthogonal."""

    def run(distributed: bool) -> Tensor:
        torch.manual_seed(5)
        params = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))]
        optimizer = Muon(params, distributed=distributed)
        for _ in range(3):
            params[0].grad = None if dist.get_rank() else torch.randn(8, 8)
            params[1].grad = torch.randn(8)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in params])

    found: list[Any] = [None, None]
    dist.all_gather_object(found, torch.equal(run(True), run(False)))
    return found


def fsdp2() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    sharded, plain = _net(), _net()
    start = flat(plain)
    for block in sharded.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(sharded)
    results = []
    for net in (sharded, plain):
        net.log = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        # a small eps would blow rounding up where gradients are zero
        optimizer = Muon(net, normalization="neuron", adam={"lr": 1e-3, "eps": 1e-3})
        for i in range(4):
            optimizer.zero_grad()
            batch = make_batch("tiny_gpt", seed=i)
            logits = net(batch["input_ids"])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            optimizer.step()
        whole = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]
        results.append(torch.cat([p.flatten() for p in whole]))
    return {"error": float((results[0] - results[1]).abs().max()), "moved": float((results[0] - start).abs().max())}


#: what Muon finds the hidden matrices by, whatever lies in pieces or on other processes
HYBRID = ("module", "names")


def hybrid(strategy: dict[str, Any], given: str, devices: int = 2) -> list[float]:
    """The weights after four steps of a run, of which :class:`HybridParallelStrategy` divides the parameters.

    Args:
        strategy: its settings; none for one process without it.
        given: one of ``HYBRID``: what the optimizer is made of.
        devices: processes.
    """
    pl.seed_everything(3, verbose=False)
    net: Any = module("tiny_gpt", dropout=0.0, num_layers=2)
    net.configure_optimizers = lambda: Muon(
        net if given == "module" else net.named_parameters(),
        normalization="neuron",
        adam={"lr": 1e-3, "eps": 1e-3},  # of eps, see fsdp2
    )
    fit(
        net,
        "tiny_gpt",
        HybridParallelStrategy(min_num_params=0, **strategy) if strategy else "auto",
        devices=devices,
        batch_size=8,
        steps=4,
        gradient_clip_val=1.0,
    )
    return flat(net).tolist()


def hybrid_in_four() -> dict[str, list[float]]:
    """The same in every layout of four processes that divides parameters, by its name and what was given."""
    layouts: dict[str, dict[str, Any]] = {
        "tensor and data": {"tensor_parallel_size": 2},
        "tensor and copies": {"tensor_parallel_size": 2, "shard": False},
        "tensor and pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "pipeline and data": {"pipeline_parallel_size": 2},
        "groups of two": {"shard": 2},
        "along the sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    }
    return {f"{name}, {given}": hybrid(s, given, 4) for name, s in layouts.items() for given in HYBRID}
