"""The pipeline's cases of mixtures of experts, whose routers' losses go next to the hidden state."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_eff.strategies._pipeline.batch import split
from lightning_eff.strategies._pipeline.pipeline import Pipeline
from tests.mixtures import built
from tests.strategies import pipeline_zoo as zoo
from tests.strategies.pipeline_compare import SCHEDULES, Logs, batch, compare, pipeline, steps, worst_of

KINDS = ("list", "pair", "attribute", "mixtral")


def data(kind: str, seed: int = 0) -> Any:
    return batch("llama" if kind == "mixtral" else "tiny_gpt", seed=seed)


def _cut(module: nn.Module, given: Any, schedule: str = "1F1B", num: int = 4, **kwargs: Any) -> Pipeline:
    Logs(module)
    pipe = pipeline(module, schedule, num, **kwargs)
    pipe.verify(steps(module), given)
    pipe.cut()
    return pipe


def whole_batch() -> dict[str, float]:
    """One micro-batch: the loss and the gradients of the whole batch, for each kind."""
    found: list[float] = []
    for kind in KINDS:
        plain, given = built(kind), data(kind)
        pipe = _cut(copy.deepcopy(plain), given, "GPipe", 1)
        Logs(plain)
        wanted = steps(plain)(given)
        wanted.backward()
        found.append(abs(float(pipe.run(steps(pipe.module), given)) - float(wanted.detach())))
        found += _apart(pipe.module, plain)
    return worst_of({"loss": max(found), "grad": max(found)})


def evaluated() -> dict[str, float]:
    """A step of evaluation, and a pass without gradients of the training step, on every rank."""
    found: dict[str, float] = {}
    for kind in KINDS:
        plain, given = built(kind), data(kind)
        pipe = _cut(copy.deepcopy(plain), given)
        Logs(plain)
        with torch.no_grad():
            found[f"{kind} looked"] = abs(float(pipe.look(steps(pipe.module), given)) - float(steps(plain)(given)))
            plain.eval()
            pipe.module.eval()
            found[f"{kind} evaluated"] = abs(
                float(pipe.evaluate(steps(pipe.module), given)) - float(steps(plain)(given))
            )
    return worst_of(found)


def said() -> list[list[str]]:
    """What rank 0 says of micro-batches: of a balance loss, and of a mean over tokens."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        _cut(built("list"), data("list"))
        found = [[said for said in records if "router's balance loss" in said]]
        records.clear()
        _cut(zoo.Attributes().double(), zoo.batches()[0])
        return [*found, [said for said in records if "router's balance loss" in said]]
    finally:
        logger.removeHandler(handler)


def padded() -> dict[str, float]:
    """Losses weighted by the labels that count, of which micro-batches have unequal numbers."""
    found: list[float] = []
    for given in zoo.texts()[1:3]:
        plain = built("mixtral")
        pipe = _cut(copy.deepcopy(plain), zoo.texts()[0])
        loss = float(pipe.run(steps(pipe.module), given))
        parts = split(given, 4)
        shares = [float((part["labels"][:, 1:] != -100).sum()) for part in parts]  # the first label is no token's next
        total = torch.stack([n / sum(shares) * steps(plain)(part) for n, part in zip(shares, parts, strict=True)]).sum()
        total.backward()
        found += [abs(loss - float(total.detach())), *_apart(pipe.module, plain)]
    return worst_of({"loss": max(found), "grad": max(found)})


def _apart(module: nn.Module, plain: nn.Module) -> list[float]:
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    pairs = [(p.grad, wanted[name]) for name, p in module.named_parameters() if p.grad is not None]
    return [float((mine - theirs).abs().max()) for mine, theirs in pairs if theirs is not None]


EXPERTS: dict[str, Callable[[], Any]] = {
    "experts_whole_batch": whole_batch,
    "experts_evaluated": evaluated,
    "experts_said": said,
    "experts_padded": padded,
}


def _grid() -> None:
    for kind in KINDS:
        for schedule in SCHEDULES:
            often = schedule in ("1F1B", "Interleaved1F1B") or (kind, schedule) == ("list", "ZBVZeroBubble")
            EXPERTS[f"{'experts' if often else 'slow_experts'}_{kind}_{schedule}"] = lambda k=kind, s=schedule: compare(
                lambda: built(k), [data(k), data(k, 1)], s
            )
        EXPERTS[f"experts_{kind}_unverified"] = lambda k=kind: compare(
            lambda: built(k), [data(k)], "GPipe", verify=False
        )
        EXPERTS[f"wide_experts_{kind}"] = lambda k=kind: compare(
            lambda: built(k, num_layers=9), [data(k)], "Interleaved1F1B", 8
        )
    EXPERTS["experts_dropout"] = lambda: compare(lambda: built("list", dropout=0.3), [data("list")], "1F1B")
    for kind in ("list", "pair"):
        EXPERTS[f"experts_{kind}_recomputed"] = lambda k=kind: compare(
            lambda: built(k, recompute=True), [data(k)], "Interleaved1F1B"
        )


_grid()
