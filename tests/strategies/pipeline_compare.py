"""A pipelined module against a single process that runs the same micro-batches."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_eff._core.blocks import find_stack
from lightning_eff.strategies._pipeline.batch import split
from lightning_eff.strategies._pipeline.pipeline import Pipeline
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import uncut
from tests import models
from tests.runs import largest

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

Wrap = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]


def tiny_gpt(num_layers: int = 5, *, dropout: float = 0.0, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = models.TinyGPT(num_layers=num_layers, dropout=dropout)
    if tied:
        module.head.weight = module.embed.weight
    return module


def hugging_face(name: str, num_layers: int = 5, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return models.hugging_face(name, num_layers=num_layers, dropout=dropout)


def steps(module: Any) -> Callable[[Any], Any]:
    return lambda batch: module.training_step(batch, 0)


class Logs:
    """Stands in for the Trainer's ``log``."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[tuple[str, Any, dict[str, Any]]] = []
        module.__dict__["log"] = self

    def __call__(self, name: str, value: Any, **options: Any) -> None:
        self.seen.append((name, value, options))


def pipeline(module: nn.Module, schedule: str = "1F1B", num: int | None = 4, **kwargs: Any) -> Pipeline:
    settings: dict[str, Any] = {"layers": None, "split": "balanced", "device": "cpu", **kwargs}
    assert dist.group.WORLD is not None
    return Pipeline(module, group=dist.group.WORLD, schedule=schedule, num_microbatches=num, **settings)


def number_of_labels(part: Any) -> float:
    """Of those that count."""
    return float((part["labels"] != -100).sum()) if "labels" in part else 1.0


def reference(
    module: nn.Module,
    batches: list[Any],
    num: int,
    *,
    seed: int = 0,
    layers: str | Sequence[str] | None = None,
    first: int = 0,
    wrap: Wrap = lambda step: step,
) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """Mean losses and summed gradients of a single process that runs the same micro-batches."""
    module = copy.deepcopy(module)
    Logs(module)
    stack = Stack(find_stack(module, layers, who="reference"), who="reference")
    losses = []
    for number, batch in enumerate(batches, first):
        parts = split(batch, num)
        shares = [1.0] * num
        if "labels" in batch and bool((batch["labels"] == -100).any()):  # a mean over the labels that count
            shares = [number_of_labels(part) for part in parts]
        total = 0.0
        for i, part in enumerate(parts):
            with uncut(stack, Stream(seed, "train", number, i)):
                output = wrap(steps(module))(part)
            loss = output if isinstance(output, Tensor) else output["loss"]
            share = shares[i] / sum(shares)
            (loss * share / len(batches)).backward()
            total += float(loss.detach()) * share
        losses.append(total)
    named = module.named_parameters(remove_duplicate=False)
    return losses, {n: p.grad for n, p in named if p.grad is not None}, module


def compare(
    make: Callable[[], nn.Module],
    batches: list[Any],
    schedule: str,
    num: int = 4,
    *,
    verify: bool = True,
    check_buffers: bool = False,
    wrap: Wrap = lambda step: step,
    **kwargs: Any,
) -> dict[str, float]:
    """The largest differences from the single process, over all ranks: of losses, gradients (and buffers)."""
    module = make()
    if schedule != "1F1B":  # what micro-batches weigh does not depend on the schedule, and is looked for under one
        kwargs.setdefault("microbatch_weight", number_of_labels)
    pipe = pipeline(copy.deepcopy(module), schedule, num, **kwargs)
    losses, gradients, whole = reference(module, batches, num, seed=pipe.seed, layers=kwargs.get("layers"), wrap=wrap)
    Logs(pipe.module)
    if verify:
        pipe.verify(wrap(steps(pipe.module)), batches[0])
    pipe.cut()
    got = [float(pipe.run(wrap(steps(pipe.module)), b, accumulate=len(batches))) for b in batches]
    held = dict(pipe.module.named_parameters(remove_duplicate=False))
    own = {n: p.grad for n, p in held.items() if p.grad is not None}
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, list(own))
    missing = set(gradients) - {n for names in seen for n in names}
    assert not missing, f"no rank has a gradient of {sorted(missing)}"
    differences = [float((grad - gradients[n]).abs().max()) if n in gradients else math.inf for n, grad in own.items()]
    differences += [math.inf for n, p in held.items() if p.requires_grad and n in gradients and n not in own]
    result = {
        "loss": largest(abs(a - b) for a, b in zip(got, losses, strict=True)),
        "grad": largest([0.0, *differences]),
        "held": sum(p.numel() for p in pipe.module.parameters()) / sum(p.numel() for p in whole.parameters()),
    }
    if check_buffers:
        buffers, wanted = dict(pipe.module.named_buffers()), dict(whole.named_buffers())
        mine = [n for n in pipe.owned_names if n in buffers]
        result["buffers"] = largest([0.0, *(float((buffers[n].float() - wanted[n].float()).abs().max()) for n in mine)])
    return worst_of(result)


def worst_of(result: dict[str, float]) -> dict[str, float]:
    values = torch.tensor(list(result.values()), dtype=torch.float64).nan_to_num(nan=math.inf)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(result, values.tolist(), strict=True))


def refused(fn: Callable[[], Any]) -> str:
    """The message with which ``fn`` is refused on this rank."""
    try:
        fn()
    except ValueError as error:
        return str(error)
    return ""


def batch(name: str, size: int = 8, seed: int = 0) -> Any:
    return models.make_batch(name, size=size, seed=seed)
