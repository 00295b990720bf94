"""On which cores runs that are compared take their turns: the same ones, those with the least else to do."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

LOOK = 0.1  # seconds for which cores are watched


@contextmanager
def on_idle_cores(count: int) -> Iterator[None]:
    """Hold this thread, and those that it starts, to the ``count`` cores that are the most idle now.

    A scheduler likes to wake a thread where it ran before. Where another process keeps one core busy, one run of a group
    can so spend a whole rehearsal beside it and another run none of it, which looks like a difference between them.
    Processes that are started meanwhile, such as a loader's workers, have all cores.

    Nothing is done where ``count`` is 0, where there are no more cores than that, or where the system does not tell how
    busy they are.

    Args:
        count: how many cores, >= 0: as many as torch has threads.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    busy = busy_ticks() if 0 < count < len(allowed) else {}
    if not allowed <= busy.keys():
        yield
        return
    time.sleep(LOOK)
    later = busy_ticks()
    chosen = set(sorted(allowed, key=lambda core: (later[core] - busy[core], core))[:count])
    start = BaseProcess.start

    def start_anywhere(self: BaseProcess) -> None:
        here = os.sched_getaffinity(0)
        os.sched_setaffinity(0, allowed)
        try:
            start(self)
        finally:
            os.sched_setaffinity(0, here)

    os.sched_setaffinity(0, chosen)
    BaseProcess.start = start_anywhere
    try:
        yield
    finally:
        BaseProcess.start = start
        os.sched_setaffinity(0, allowed)


def busy_ticks() -> dict[int, float]:
    """What each core has worked so far, in the kernel's clock ticks, from Linux's ``/proc/stat``; empty elsewhere."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return {}
    found: dict[int, float] = {}
    for line in lines:
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _waiting, *others = map(int, ticks)
            found[int(name[3:])] = float(user + nice + system + sum(others[:3]))
    return found
