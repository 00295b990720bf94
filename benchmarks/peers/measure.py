"""The time of two arms in turns, and the memory of a step of each."""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.memory.measure import Peak
from benchmarks.peers.case import Arm

WARM_UP = 3  #: steps of each arm that are not timed: the first ones make states, plans and caches
SHORTEST = 5e-3  #: seconds of a turn, at least; short steps are repeated within a turn
RESAMPLES = 2000
__all__ = ["interval", "state_bytes", "transient_bytes", "turns"]


def transient_bytes(step: Callable[[], object]) -> int:
    """Return the peak of the bytes that one call of ``step`` allocates, beyond those that are there when it begins.

    Memory events belong to a thread. A step that works in a thread of its own has a method ``within(scope)``, which runs one
    step there inside the context manager.
    """
    gc.collect()
    peak = Peak()
    within = getattr(step, "within", None)
    if within is not None:
        within(peak)
    else:
        with peak:
            step()
    return peak.bytes


def state_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def turns(ours: Arm, peer: Arm, rounds: int, seconds: float) -> dict[str, Any]:
    """Time both arms in turns by processor time. The order changes every round, so both follow each other equally often.

    Args:
        ours: the first arm.
        peer: the second arm.
        rounds: turns of each, at most.
        seconds: of processor time for both together. Fewer rounds are made if they would take longer, but at least 10
            (or ``rounds``, if that is less).

    Returns:
        Milliseconds of one step as quartiles of each arm, ``ratio`` (of the medians), its 95 % ``interval``, and how many
        ``rounds`` and ``calls`` per round there were.
    """
    once = [_warm(arm.step) for arm in (ours, peer)]
    calls = max(1, math.ceil(SHORTEST / max(once)))
    fit = int(seconds / (calls * sum(once)))
    made = max(min(rounds, 10), min(rounds, fit))
    times: tuple[list[float], list[float]] = ([], [])
    with _no_collections():
        for round_ in range(made):
            for side in (0, 1) if round_ % 2 == 0 else (1, 0):
                times[side].append(_seconds((ours, peer)[side].step, calls))
            gc.collect(0)
    ratio, low, high = interval(*times)
    return {
        "ours_ms": _quartiles(times[0]),
        "peer_ms": _quartiles(times[1]),
        "ratio": ratio,
        "interval": [low, high],
        "rounds": made,
        "calls": calls,
    }


def interval(ours: list[float], peer: list[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians and its 95 % interval by the bootstrap over rounds."""
    pairs = np.array([ours, peer])
    chosen = np.random.default_rng(0).integers(0, pairs.shape[1], (RESAMPLES, pairs.shape[1]))
    medians = np.median(pairs[:, chosen], axis=-1)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return statistics.median(ours) / statistics.median(peer), float(low), float(high)


def _warm(step: Callable[[], object]) -> float:
    taken = [_seconds(step, 1) for _ in range(WARM_UP + 2)]
    return max(min(taken[WARM_UP:]), 1e-6)


def _seconds(step: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        step()
    return (time.process_time() - began) / calls


def _quartiles(taken: list[float]) -> list[float]:
    return [1e3 * float(q) for q in np.quantile(taken, [0.25, 0.5, 0.75])]


@contextlib.contextmanager
def _no_collections() -> Any:
    """A collection of garbage by chance, in the middle of a turn, would be counted to that arm."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
