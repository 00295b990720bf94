"""What limits trials: memory, other programs, and techniques that do not train together."""

import math
import os
import time
from collections.abc import Callable, Sequence

import torch

from lightning_eff._exports import public
from lightning_eff.advice.looking import View
from lightning_eff.advice.trials import Trial

TOGETHER = 4  #: trials beside a baseline


def largest(fails: Callable[[int], str | None], most: int, deadline: float) -> tuple[int, str]:
    """The largest power of two that does not fail, and why no larger one was taken.

    Args:
        fails: whether steps with batches of so many times the size fail, and why.
        most: the largest factor that the data allow.
        deadline: by :func:`time.monotonic`.
    """
    factor = 1
    while 2 * factor <= most:
        if time.monotonic() > deadline:
            return factor, "there was no time to try larger ones"
        if (why := fails(2 * factor)) is not None:
            return factor, "twice as many do not fit" if "memory" in why.lower() else f"twice as many fail: {why}"
        factor *= 2
    return factor, "an epoch has no larger ones"


def busy() -> str | None:
    """The note for a machine on which other programs run; None if it is idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores + 1:
        return None
    return (
        f"Other processes keep this machine busy (a load of {load:.0f} on {cores} cores). Intervals are wide then, and loaders'"
        " workers gain less. Repeat it on an idle machine."
    )


def conflict(trials: Sequence[Trial]) -> str | None:
    """Why these trials cannot train together, from what their techniques declare; None where nothing is declared."""
    if sum(len(trial.change.plugins) + ("precision" in trial.change.trainer) for trial in trials) > 1:
        return "a Trainer has one precision"
    names = [name for trial in trials for name in trial.change.classes]
    for name in names:
        cls = public.found(name) if name in public.HOMES else None
        for other, why in getattr(cls, "conflicts", {}).items():
            if other in names:
                return f"{name} and {other}: {why}"
    return None


def together(view: View) -> int:
    """The number of trials that fit into memory together with the baseline."""
    if view.run.accelerator == "cuda":
        total = torch.cuda.get_device_properties(torch.device("cuda")).total_memory
        own = view.peak_bytes
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**33
        own = 2 * sum(view.memory.values())
    return min(max(math.floor(0.5 * total / max(own, 1)) - 1, 1), TOGETHER)
