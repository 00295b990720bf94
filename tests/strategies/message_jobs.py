"""What processes send one another, and wait for: counted in short runs and single calls."""

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.messages import Messages, Reads, counted
from lightning_eff.strategies._communication import gathering as communication
from lightning_eff.strategies._hybrid import gradients, shards
from lightning_eff.strategies._hybrid.saving import gathering
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.models import TinyClassifier, flat, loader, trainer
from tests.strategies.hybrid_jobs import everywhere


def observe_sums() -> dict[str, Any]:
    """Gradients on both ranks, on one and on none, in two types, summed and averaged."""
    rank, found = dist.get_rank(), {}
    group = dist.group.WORLD
    assert group is not None
    for mean in (False, True):
        params = [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float32, torch.float64) for _ in range(20)]
        both, alone = params[::2], params[1]
        for p in both:
            p.grad = torch.full_like(p, 1.0 + rank)
        if rank == 0:
            alone.grad = torch.full_like(alone, 4.0)
        with Reads() as reads, Messages() as messages:
            shards.all_reduce_gradients(params, group, mean=mean)
        assert alone.grad is not None
        found[str(mean)] = {
            "both": sorted({v for p in both if p.grad is not None for v in p.grad.tolist()}),
            "alone": alone.grad.tolist(),
            "none": [p.grad for p in params[3::2]],
            "messages": messages.collectives.total(),
            "reads": everywhere(reads.places.total()),
        }
    with Reads() as reads:
        shards.all_reduce_gradients(both, group)
    found["reads where all are there"] = everywhere(reads.places.total())
    with patch.object(shards, "_MOST_BYTES", 24), Messages() as messages:
        shards.all_reduce_gradients(both[:10], group)  # ten of 12 bytes each
    found["messages of 24 bytes"] = messages.collectives.total()
    return found


class Kernels(Messages):
    """Counts all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def observe_norms() -> dict[str, Any]:
    """How many operations the norm and the clipping of few and of many gradients take, and how far they are off."""
    found: dict[str, Any] = {"operations": []}
    for number in (3, 30):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.zeros(5)) for _ in range(number)]
        plain = [nn.Parameter(torch.zeros(5)) for _ in range(number)]
        for p, q in zip(params, plain, strict=True):
            p.grad = torch.randn(5)
            q.grad = p.grad.clone()
        with Kernels() as kernels:
            norm = gradients.global_norm(
                [(p, p.grad) for p in params],
                coordinates={"data": dist.get_rank()},
                counts=lambda p: True,
                device=torch.device("cpu"),
            )
            gradients.clip_by_norm(params, norm, 0.5)
            gradients.clip_by_value(params, 0.1)
        found["operations"].append(kernels.number)
        expected = nn.utils.clip_grad_norm_(plain, 0.5)
        nn.utils.clip_grad_value_(plain, 0.1)
        assert abs(float(norm) - float(expected)) < 1e-6
        for p, q in zip(params, plain, strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad, q.grad)
    return found


def observe_gathering() -> dict[str, Any]:
    """Objects of unequal sizes on rank 0, and the most bytes that it had from others at once."""
    rank, most, plain = dist.get_rank(), [0], dist.gather

    def gather(tensor: Tensor, gather_list: list[Tensor] | None = None, **kwargs: Any) -> Any:
        most[0] = max(most[0], sum(t.nbytes for t in gather_list or ()))
        return plain(tensor, gather_list, **kwargs)

    mine = {"weights": [torch.arange(100.0 + 900 * rank), "of rank", rank]}
    with patch.object(communication, "_MOST_BYTES", 1024), patch.object(dist, "gather", gather):
        found = communication.gather_on_first(mine, torch.device("cpu"))
    if found is None:
        return {}
    right = all(
        one["weights"][2] == r and torch.equal(one["weights"][0], torch.arange(100.0 + 900 * r))
        for r, one in enumerate(found)
    )
    return {"right": right, "most": most[0]}


class Partly(TinyClassifier):
    """Some steps leave parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        return loss + 0.0 * self.spare.weight.sum() if batch_idx == 0 else loss


def fitted(model: pl.LightningModule, strategy: Any, steps: int = 3) -> pl.Trainer:
    run = trainer(strategy=strategy, devices=2, max_steps=steps)
    run.fit(model, loader("classifier"))
    return run


def observe_unused() -> str | None:
    """What is wrong with steps that use some parameters, with and without ``find_unused_parameters``."""
    pl.seed_everything(1, verbose=False)
    fitted(Partly(), HybridParallelStrategy(shard=False, find_unused_parameters=True, failure_timeout=None))
    try:
        fitted(Partly(), HybridParallelStrategy(shard=False, failure_timeout=None))
    except RuntimeError as error:
        return str(error)
    return None


def observe_ends() -> dict[str, Any]:
    """Which ranks have whole weights after a run, and what the next run makes of them."""
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {"failure_timeout": None, "min_num_params": 0}
    ends: list[tuple[str, int, Any]] = [
        ("small", 2**32, "auto"),
        ("large", 0, "auto"),
        ("asked", 0, True),
        ("none", 0, False),
    ]
    for name, least, gather in ends:
        pl.seed_everything(1, verbose=False)
        model = TinyClassifier()
        with patch.object(gathering, "_COPIED_BYTES", least):
            fitted(model, HybridParallelStrategy(gather_after_fit=gather, **arguments))
        meta = any(p.is_meta for p in model.parameters())
        found[name] = everywhere(None if meta else float(flat(model).double().sum()))
        try:
            fitted(model, HybridParallelStrategy(gather_after_fit=True, **arguments), steps=1)
            found[f"{name}, again"] = everywhere(float(flat(model).double().sum()))
        except ValueError as error:
            found[f"{name}, again"] = everywhere(str(error))
    return found


def observe_steps() -> dict[str, Any]:
    """What a training step sends and waits for, with few and with many micro-batches."""
    pipeline = {"pipeline_parallel_size": 2}
    return {
        "few": counted({**pipeline, "num_microbatches": 2}),
        "many": counted({**pipeline, "num_microbatches": 8}),
        "shards": counted({"min_num_params": 0}),
    }


def observe(directory: str) -> dict[str, Any]:
    """All of it."""
    steps = observe_steps()  # with the first process group of the Trainer
    return {
        "steps": steps,
        "sums": observe_sums(),
        "norms": observe_norms(),
        "gathering": observe_gathering(),
        "ends": observe_ends(),
        "unused": observe_unused(),
    }
