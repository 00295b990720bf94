"""Turns: short runs of a Trainer with an arm's techniques, timed, and their memory measured."""

import contextlib
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch._functorch.config
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.memory.models import Plain, Task

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
WARM_UP = 3  #: steps that are not timed: the first one measures, compiles and allocates


@dataclass(frozen=True)
class Arm:
    """A way of training.

    Args:
        name: as it stands in the table.
        techniques: makes its callbacks, given the path of the blocks (None where they are found by themselves).
        compiled: torch's ``activation_memory_budget`` for the compiled model; None does not compile.
        plugin: makes its precision plugin, in place of the run's precision.
    """

    name: str
    techniques: Callable[[str | None], list[Any]] = lambda layers: []
    compiled: float | None = None
    plugin: Callable[[], Any] | None = None


@dataclass
class Turn:
    """What one run of an arm measured.

    Attributes:
        seconds: of each timed step.
        beyond_bytes: the most that a step held until its backward pass was over, beyond what was there when it began,
            which was without gradients.
        peak_bytes: the most that CUDA's allocator had given out during the timed steps; 0 on a CPU.
        told: of the technique's plan, if it has one.
        error: why the run failed.
        no_memory: it failed for want of memory.
    """

    seconds: list[float] = field(default_factory=list)
    beyond_bytes: int = 0
    peak_bytes: int = 0
    told: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    no_memory: bool = False


def clock() -> float:
    """Seconds: with all work of the GPU done; on a CPU of one thread, the process's own processor time."""
    if CUDA:
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


class Peak:
    """The most bytes that a CPU's allocator has given out since the beginning, in ``bytes`` after the end."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> "Peak":
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._profile.__exit__(*args)
        found: Any = self._profile.profiler
        now = 0
        for event in sorted(
            (e for e in found.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
        ):
            now += event.nbytes()
            self.bytes = max(self.bytes, now)


class Watch(Callback):
    """Times each step from the end of the one before it; the memory is that of the last step, which on a CPU is not timed.

    Args:
        turn: where to write.
        steps: that are timed.
        memory: measure the memory, in one step more.
        warm_up: steps before them.
    """

    def __init__(self, turn: Turn, steps: int, memory: bool, warm_up: int = WARM_UP) -> None:
        self.turn, self.steps, self.memory, self.warm_up = turn, steps, memory, warm_up
        self.peak: Peak | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if CUDA and batch_idx == self.warm_up:
            torch.cuda.reset_peak_memory_stats()
        if not self.memory or batch_idx < self.warm_up + self.steps:
            return
        pl_module.zero_grad(set_to_none=True)  # the last step's gradients would go in the midst of this one
        if CUDA:
            torch.cuda.synchronize()
            self.turn.peak_bytes = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.peak = Peak().__enter__()

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        if not self.memory or trainer.fit_loop.epoch_loop.batch_idx < self.warm_up + self.steps:
            return
        if self.peak is not None:
            self.peak.__exit__(None, None, None)
            self.turn.beyond_bytes, self.peak = self.peak.bytes, None
        elif CUDA:
            self.turn.beyond_bytes = torch.cuda.max_memory_allocated() - self.before

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = clock()
        if self.warm_up <= batch_idx < self.warm_up + self.steps:
            self.turn.seconds.append(now - self.began)
        self.began = clock()


@contextlib.contextmanager
def compiling(budget: float | None) -> Iterator[Callable[[nn.Module], Any]]:
    """``compile(model)`` under torch's memory budget, and nothing left behind."""
    if budget is None:
        yield lambda model: model
        return
    config: Any = torch._functorch.config
    backend = "inductor" if CUDA else "aot_eager"
    torch._dynamo.reset()
    try:
        with config.patch(activation_memory_budget=budget):
            yield lambda model: torch.compile(model, backend=backend)
    finally:
        torch._dynamo.reset()


def run(
    task: Task,
    model: nn.Module,
    arm: Arm,
    batch_size: int,
    steps: int,
    precision: Any,
    *,
    memory: bool = True,
    warm_up: int = WARM_UP,
) -> Turn:
    """Train for some steps in the arm's way.

    Args:
        task: whose data.
        model: made by ``task.build``; it goes on from where it is.
        arm: the way.
        batch_size: samples.
        steps: that are timed.
        precision: as a Trainer takes it.
        memory: measure it too.
        warm_up: steps before, that are not timed; at least 1.

    Returns:
        The measures; one with ``error`` if the run failed.

    The batch is made once and lies on the device: no step waits for a copy of it.
    """
    turn, total = Turn(), warm_up + steps + memory
    clear()  # a run that failed for want of memory may still hold some
    chosen: dict[str, Any] = {"precision": precision} if arm.plugin is None else {"plugins": [arm.plugin()]}
    try:
        with compiling(arm.compiled) as compile_:
            techniques = arm.techniques(task.layers or None)
            pl.seed_everything(0, verbose=False)
            trainer = Trainer(
                accelerator="gpu" if CUDA else "cpu",
                devices=1,
                **chosen,
                max_steps=total,
                callbacks=[*techniques, Watch(turn, steps, memory, warm_up)],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            batches: Any = [{key: value.to(DEVICE) for key, value in task.batch(batch_size).items()}] * total
            loader = DataLoader(batches, batch_size=None)
            trainer.fit(Plain(compile_(model)), loader)
            for technique in techniques:
                turn.told |= _told(technique)
    except torch.cuda.OutOfMemoryError:
        turn.error, turn.no_memory = "out of memory", True
    except Exception as error:
        turn.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        turn.no_memory = "out of memory" in str(error)
    model.zero_grad(set_to_none=True)
    clear()
    return turn


def clear() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def _told(technique: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    plan = getattr(technique, "plan", None)
    if plan is not None:
        told["plan_peak_bytes"], told["plan_seconds"] = plan.peak_bytes, plan.seconds
        told["plan_forward_calls"] = plan.total_forward_calls
        told["stages"] = plan.stages
    report = technique.report()
    return told | {
        key: float(report[key]) for key in ("saved_bytes", "ratio", "bits", "bytes_to_host") if key in report
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor Lightning's words about each run."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric", "pytorch.utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def quartile(values: list[float]) -> float:
    """The lower one; of one value itself."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def plainly(task: Task, batch_size: int, precision: Any) -> tuple[nn.Module, Turn]:
    """The task's model, and what a plain step of it measured."""
    model = task.build()
    return model, run(task, model, Arm("plain"), batch_size, 1, precision)


def compare(
    task: Task,
    arms: list[Arm],
    batch_size: int,
    rounds: int,
    steps: int,
    precision: Any,
    tell: Callable[[str], None],
    *,
    first: tuple[nn.Module, Turn] | None = None,
) -> list[dict[str, Any]]:
    """Each arm against the plain run just before it, in turns, ``rounds`` times: A B A B.

    ``first`` is what :func:`plainly` gave, where several comparisons share it.

    Returns:
        A row for each arm: ``ratio`` of its steps' median seconds to those of the plain turn before it, over the rounds;
        ``quartile_ratio``, the lower quartile of all its steps to that of all plain steps, which others' use of the
        machine touches less; and what else it measured.
    """
    plain_arm = Arm("plain")
    model, alone = first or plainly(task, batch_size, precision)
    of_plain = {"plain_beyond_bytes": alone.beyond_bytes, "plain_peak_bytes": alone.peak_bytes}
    rows: dict[str, dict[str, Any]] = {
        arm.name: {"model": task.name, "arm": arm.name, "batch_size": batch_size} for arm in arms
    }
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    steps_of: dict[str, list[float]] = {arm.name: [] for arm in arms}
    plain_steps: list[float] = []
    ratios: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for round_ in range(rounds):
        for arm in arms:
            row = rows[arm.name]
            if "error" in row:
                continue
            plain = run(task, model, plain_arm, batch_size, steps, precision, memory=False)
            turn = run(task, model, arm, batch_size, steps, precision, memory=round_ == 0)
            if turn.error:
                row["error"] = turn.error
                tell(f"{task.name}, batch {batch_size}, {arm.name}: {turn.error}")
                continue
            here = statistics.median(turn.seconds)
            seconds[arm.name].append(here)
            steps_of[arm.name] += turn.seconds
            plain_steps += plain.seconds
            if plain.error:
                row["plain"] = plain.error
            else:
                ratios[arm.name].append(here / statistics.median(plain.seconds))
            if round_ == 0:
                row |= {"beyond_bytes": turn.beyond_bytes, "peak_bytes": turn.peak_bytes, **of_plain}
            row |= {key: value for key, value in turn.told.items() if key != "stages"}
            tell(
                f"{task.name}, batch {batch_size}, round {round_ + 1} of {rounds}, {arm.name}: {1e3 * here:.1f} ms a step"
                + ("" if plain.error else f", {ratios[arm.name][-1]:.3f} times plain")
                + f", {row['beyond_bytes'] / 2**20:.1f} MiB of {alone.beyond_bytes / 2**20:.1f}"
            )
    for arm in arms:
        row, times = rows[arm.name], seconds[arm.name]
        if times and "error" not in row:
            row["seconds"], row["unit"] = spread(times), task.unit
            row["items_per_second"] = task.items * batch_size / row["seconds"]["median"]
            if ratios[arm.name]:
                row["ratio"] = spread(ratios[arm.name])
                row["quartile_ratio"] = quartile(steps_of[arm.name]) / quartile(plain_steps)
    return list(rows.values())


def device_bytes() -> int:
    """Of the device's memory, in all; 0 on a CPU."""
    return torch.cuda.mem_get_info()[1] if CUDA else 0


def next_size(fits: int, fails: int, peaks: dict[int, int]) -> int:
    """The batch size to try next.

    Args:
        fits: the largest that fits, 0 if none is known.
        fails: the smallest that does not, 0 if none is known.
        peaks: bytes at the most, of those that fit. With two of them a line says where memory ends: 19 of 20 bytes of the
            device are reckoned with, since the allocator loses some between its blocks.
    """
    if not fits:
        return fails // 2
    if fails:
        return max((fits + fails) // 2, 15 * fails // 16 if fails > 2 * fits else 0)
    (last, peak), *others = sorted(peaks.items(), reverse=True)[:2] or [(fits, 0)]
    slope = (peak - others[0][1]) / (last - others[0][0]) if others else 0.0
    if slope <= 0:
        return 2 * fits
    guess = int(fits + (0.95 * device_bytes() - peak) / slope)
    return min(max(guess, fits + fits // 16 + 1), 64 * fits)


def largest_batch(task: Task, arm: Arm, start: int, precision: Any, tell: Callable[[str], None]) -> dict[str, Any]:
    """The largest batch that fits on the GPU, to a sixteenth: doubled once, predicted from two peaks, then bisected.

    Returns:
        ``largest_batch``, ``items_per_second`` with it, or ``error``.
    """
    model = task.build()
    fits, fails, size = 0, 0, max(start, 1)
    best, peaks = Turn(), dict[int, int]()
    while not fails or not fits or fails - fits > max(1, fits // 16):
        turn = run(task, model, arm, size, 1, precision, warm_up=1)
        tell(f"{task.name}, {arm.name}: a batch of {size} {turn.error or 'fits'}")
        if turn.error and not turn.no_memory:
            return {"model": task.name, "arm": arm.name, "error": turn.error}
        if turn.error:
            fails = size
            if size == 1:
                break
        else:
            fits, best, peaks[size] = size, turn, turn.peak_bytes
        size = next_size(fits, fails, peaks)
    row: dict[str, Any] = {"model": task.name, "arm": arm.name, "largest_batch": fits, "unit": task.unit}
    if best.seconds:
        row |= {"peak_bytes": best.peak_bytes, "items_per_second": task.items * fits / statistics.median(best.seconds)}
    return row
