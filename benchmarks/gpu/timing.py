"""Times and rates: turns of a program on the device, and the spread over rounds."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

TURN = 0.1  #: seconds that a turn takes about


def device(tiny: bool) -> torch.device:
    """Where a unit computes."""
    return torch.device("cpu" if tiny else "cuda")


def synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def seconds(run: Callable[[], Any], where: torch.device, repetitions: int) -> float:
    """The mean of some runs in a row, with all work of the device done."""
    synchronize(where)
    began = time.perf_counter()
    for _ in range(repetitions):
        run()
    synchronize(where)
    return (time.perf_counter() - began) / repetitions


def repetitions(run: Callable[[], Any], where: torch.device, tiny: bool, turn: float = TURN) -> int:
    """So many that a turn takes about ``turn`` seconds; warms up in passing."""
    if tiny:
        return 1
    run()
    return max(1, min(500, round(turn / seconds(run, where, 2))))


def rates(
    run: Callable[[], Any], amount: float, where: torch.device, *, tiny: bool, rounds: int = 5, turn: float = TURN
) -> list[float]:
    """``amount`` over the seconds of a run, in each of some rounds."""
    times = repetitions(run, where, tiny, turn)
    return [amount / seconds(run, where, times) for _ in range(2 if tiny else rounds)]


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least, most, and of how many."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}
