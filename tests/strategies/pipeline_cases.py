"""The cases of the pipeline tests: every model under every schedule, hazards, and all that surrounds a step."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_eff.strategies._pipeline.pipeline import Pipeline
from tests.strategies import pipeline_hazards as hazards
from tests.strategies import pipeline_models as models
from tests.strategies import pipeline_refused as refusals
from tests.strategies.pipeline_compare import (
    SCHEDULES,
    Logs,
    batch,
    compare,
    hugging_face,
    pipeline,
    reference,
    refused,
    steps,
    tiny_gpt,
)

CASES: dict[str, Callable[[], Any]] = {}


def case(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Register a case, which every rank runs."""
    CASES[fn.__name__] = fn
    return fn


def _grid() -> None:
    def add(name: str, fn: Callable[[], Any]) -> None:
        CASES[name] = fn

    for schedule in SCHEDULES:
        for tied in (False, True):
            add(
                f"gpt_{'tied' if tied else 'untied'}_{schedule}",
                lambda s=schedule, t=tied: compare(lambda: tiny_gpt(tied=t), [batch("tiny_gpt")], s),
            )
        for model in ("gpt2", "llama", "bert", "vit"):
            add(f"{model}_{schedule}", lambda s=schedule, m=model: compare(lambda: hugging_face(m), [batch(m)], s))


_grid()

# -- hazards: each works as in the single process, or is refused


def hazard(cls: Any, schedule: str = "1F1B", *, batches: list[Any] | None = None, **kwargs: Any) -> dict[str, float]:
    return compare(cls, [hazards.batch()] if batches is None else batches, schedule, **kwargs)


EXACT = ("Noise", "Norms", "Conditioned", "Mixed", "InPlace", "Checkpointed", "Segmented", "Shrinking", "Shared")
EXACT += ("Detached", "Acting", "Second", "Views", "Unused", "Between", "Spare", "Named", "Hooked")
REFUSED = ("Skips", "Summed", "Regularised", "Twice", "Dropping", "TwoOutputs", "Manual", "OwnBackward")
REFUSED += ("SideOutputs", "Reentrant", "Quiet", "Noted", "Nothing", "Infinite")

_MASKED = {**hazards.batch(seed=1), "mask": torch.arange(hazards.LENGTH).expand(8, -1) < 2}
_BATCHES = {"Shrinking": [hazards.batch(8, 16)], "Spare": [hazards.batch(), _MASKED]}


def _hazards() -> None:
    for name in EXACT:
        for schedule in SCHEDULES:
            buffers = name == "Norms"
            prefix = "exact" if schedule in ("1F1B", "ZBVZeroBubble") else "slow"
            CASES[f"{prefix}_{name}_{schedule}"] = lambda n=name, s=schedule, b=buffers: hazard(
                getattr(hazards, n), s, check_buffers=b, batches=_BATCHES.get(n)
            )
    for name in REFUSED:
        CASES[f"refused_{name}"] = lambda n=name: refused(lambda: _setup(getattr(refusals, n)()))
    for schedule in SCHEDULES:
        CASES[f"dropout_gpt_{schedule}"] = lambda s=schedule: compare(
            lambda: tiny_gpt(dropout=0.3), [batch("tiny_gpt"), batch("tiny_gpt", seed=1)], s
        )
        CASES[f"{'dropout' if schedule in ('1F1B', 'ZBVZeroBubble') else 'slow_dropout'}_gpt2_{schedule}"] = (
            lambda s=schedule: compare(lambda: hugging_face("gpt2", dropout=0.2), [batch("gpt2")], s)
        )


_hazards()


def _setup(module: nn.Module, schedule: str = "1F1B", **kwargs: Any) -> Pipeline:
    pipe = pipeline(module, schedule, **kwargs)
    pipe.verify(steps(module), hazards.batch())
    return pipe


# -- other models


@case
def longer_heads() -> Any:
    return hazard(hazards.Headed)


@case
def halves() -> Any:
    return hazard(hazards.Halves, layers=["lower", "body.upper"])


@case
def biased() -> Any:
    """T5's blocks hand a position bias on."""
    module = models.model("t5")
    return refused(lambda: pipeline(module, layers="model.decoder.block").verify(steps(module), batch("t5")))


def _wide() -> None:
    """Pipelines of four ranks: up to eight stages."""

    def add(name: str, make: Callable[[], nn.Module], data: str, schedule: str, num: int = 8) -> None:
        CASES[f"wide_{name}_{schedule}"] = lambda: compare(make, [batch(data)], schedule, num)

    for schedule in SCHEDULES:
        add("tied", lambda: tiny_gpt(9, tied=True, dropout=0.1), "tiny_gpt", schedule)
    for name in ("gpt2", "llama", "bert", "vit"):
        add(name, lambda n=name: hugging_face(n, 5, 0.0), name, "1F1B", 4)
    for schedule in ("ZBVZeroBubble", "DualPipeV"):
        add("llama", lambda: hugging_face("llama", 9), "llama", schedule)
    for name in models.SLOW:
        CASES[f"slow_{name}"] = lambda n=name: compare(lambda: models.model(n), [batch("llama")], "1F1B")
        CASES[f"slow_{name}_ZBVZeroBubble"] = lambda n=name: compare(
            lambda: models.model(n), [batch("llama")], "ZBVZeroBubble"
        )


_wide()


def cut(module: nn.Module, schedule: str = "1F1B", num: int | None = 4, *, verify: bool = True) -> Pipeline:
    Logs(module)
    pipe = pipeline(module, schedule, num)
    if verify:
        pipe.verify(steps(module), hazards.batch())
    pipe.cut()
    return pipe


# -- batches


@case
def containers() -> Any:
    """Batches that are tuples of dicts with lists, shared tensors and numbers in them."""
    whole = hazards.batch()
    rest = {"y": whole["y"], "names": [f"s{int(v)}" for v in whole["y"]], "mask": torch.ones(hazards.LENGTH)}
    return compare(hazards.Container, [((whole["x"], rest), 0.5)], "1F1B")


@case
def batch_encoding() -> Any:
    from transformers import BatchEncoding

    return compare(lambda: hugging_face("bert"), [BatchEncoding(batch("bert"))], "1F1B")


@case
def shapes_that_change() -> Any:
    """Other lengths, and a smaller last batch, which is split into the largest number of parts that fits."""
    batches = [hazards.batch(8, 6), hazards.batch(8, 9), hazards.batch(8, 4), hazards.batch(8, 6, seed=3)]
    result = compare(hazards.Plain, batches, "Interleaved1F1B")
    pipe = cut(hazards.Plain(), "1F1B", 4)
    loss = float(pipe.run(steps(pipe.module), hazards.batch(8)))
    losses, _, _ = reference(hazards.Plain(), [hazards.batch(8)], 4)
    last = [float(pipe.run(steps(pipe.module), hazards.batch(size))) for size in (6, 1)]
    lasts = [reference(hazards.Plain(), [hazards.batch(size)], n)[0][0] for size, n in ((6, 3), (1, 1))]
    rest = {f"last {i}": abs(a - b) for i, (a, b) in enumerate(zip(last, lasts, strict=True))}
    return {**result, "before": abs(loss - losses[0]), **rest}


@case
def odd_batch() -> Any:
    pipe = cut(hazards.Plain(), "1F1B", 4)
    return refused(lambda: pipe.run(steps(pipe.module), hazards.batch(10)))


@case
def normalised_apart() -> Any:
    """What is said of norms over micro-batches; rank 0 says it."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        cut(hazards.Norms())
    finally:
        logger.removeHandler(handler)
    return any(
        "'blocks.0.norm' and 5 more modules normalize over each of 4 micro-batches of 2" in said for said in records
    )


@case
def used_too_late() -> Any:
    """A value that a stage let go of is NaN to a step that comes to need it: is each loss finite?"""
    pipe = cut(hazards.Late())
    whole = hazards.batch()
    batches = (whole, {**whole, "scaled": torch.ones(8)})
    return [math.isfinite(float(pipe.run(steps(pipe.module), b))) for b in batches]


@case
def number_left_to_the_batch() -> Any:
    """Without num_microbatches each batch gets the largest number that divides it, up to twice the stages."""
    pipe = cut(hazards.Plain(), "1F1B", None)
    counts: list[int] = []

    def step(part: Any) -> Any:
        counts.append(len(part["y"]))
        return steps(pipe.module)(part)

    sizes = []
    for size in (8, 6, 5, 1):
        counts.clear()
        pipe._schedules.clear()
        pipe.run(step, hazards.batch(size))
        sizes.append(size // counts[-1])
    return sizes


@case
def other_batches_on_other_ranks() -> Any:
    pipe = cut(hazards.Plain())
    content = refused(lambda: pipe.run(steps(pipe.module), hazards.batch(seed=dist.get_rank())))
    shapes = refused(lambda: pipe.run(steps(pipe.module), hazards.batch(length=5 + dist.get_rank())))
    return [content, shapes]
