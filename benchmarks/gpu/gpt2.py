"""GPT-2 124M through a Trainer, the batch on the device: low precision, techniques that save memory, largest batches.

Each arm is a run of its own, in turns with a plain one in bf16-mixed where nothing is compiled; compiled, the plain model is an
arm that comes first, since each run compiles anew. Steps are forward, backward and AdamW's.
"""

import functools
import statistics
from typing import Any

from torch import nn

from benchmarks.gpu.low_precision import plugins
from benchmarks.gpu.work import Row, Skip, Work
from benchmarks.memory.arms import arms as memory_arms
from benchmarks.memory.measure import Arm, Turn, compare, largest_batch, plainly, quiet
from benchmarks.memory.measure import run as measured_run
from benchmarks.memory.models import Task, tasks

MEMORY = (
    "plain",
    "full",
    "sqrt",
    "selective",
    "optimal 0.5",
    "compile 0.5",
    "offload",
    "compress 4",
    "optimizer offload",
)
"""Nine arms."""


def low_precision_arms(*, tiny: bool, compiled: bool) -> dict[str, Arm]:
    """GPT-2 by each plugin; the tied head stays in bfloat16."""
    found = plugins(tiny=tiny, skip=("head",))
    return {name: Arm(name, plugin=make, compiled=1.0 if compiled else None) for name, make in found.items()}


def run(work: Work) -> None:
    """Settings: ``what`` ("low precision", "memory" or "largest"), ``compiled``, ``arms``, ``rounds``, ``steps``, and
    ``batch_size``, which a largest batch is looked for from.
    """
    settings, task = work.settings, tasks(tiny=work.tiny)["gpt2"]
    with quiet():
        if settings["what"] == "low precision":
            chosen = low_precision_arms(tiny=work.tiny, compiled=settings["compiled"])
        else:
            chosen = memory_arms(tiny=work.tiny)
        first = functools.cache(lambda: plainly(task, settings["batch_size"], precision(work)))
        for name in settings["arms"]:
            arm = chosen[name]
            if settings["what"] == "largest":
                work.row(name, lambda arm=arm: largest(task, arm, work), needs=20)
            elif settings["compiled"]:
                work.row(name, lambda arm=arm: alone(task, arm, work), needs=35)
            else:
                work.row(name, lambda arm=arm: in_turns(task, arm, work, first()), needs=20)


def precision(work: Work) -> str:
    return "32-true" if work.tiny else "bf16-mixed"


def in_turns(task: Task, arm: Arm, work: Work, first: tuple[nn.Module, Turn]) -> Row:
    """Against plain training, A B A B, after a first plain run."""
    s = work.settings
    (row,) = compare(
        task, [arm], s["batch_size"], s["rounds"], s["steps"], precision(work), lambda text: None, first=first
    )
    return outcome(row)


def alone(task: Task, arm: Arm, work: Work) -> Row:
    """One run, compiled, and the ratio to the plain one of this unit, if that is there."""
    s = work.settings
    turn = measured_run(task, task.build(), arm, s["batch_size"], s["steps"], precision(work))
    if turn.error:
        return outcome({"error": turn.error})
    middle = statistics.median(turn.seconds)
    row: Row = {"seconds": middle, "tokens_per_second": task.items * s["batch_size"] / middle}
    row |= {"beyond_bytes": turn.beyond_bytes, "peak_bytes": turn.peak_bytes}
    first = next((of for of in work.result["rows"] if of["row"] == s["arms"][0] and "seconds" in of), None)
    return row | ({} if first is None else {"ratio": middle / first["seconds"], "over": first["row"]})


def largest(task: Task, arm: Arm, work: Work) -> Row:
    """The largest batch that fits, to a sixteenth."""
    start = work.settings["batch_size"]
    if work.tiny:
        raise Skip("a CPU's memory has no end that could be looked for")
    return outcome(largest_batch(task, arm, start, precision(work), lambda text: print(f"    {text}", flush=True)))


def outcome(row: dict[str, Any]) -> Row:
    """A row of ``benchmarks.memory`` as one of ours: what failed for want of memory is an outcome, and all else an error."""
    row = {key: value for key, value in row.items() if key != "arm"}
    if "error" in row:
        if "out of memory" in row["error"]:
            return {"out_of_memory": True}
        raise RuntimeError(row["error"])
    return row
