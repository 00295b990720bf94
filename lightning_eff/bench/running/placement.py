"""Keep runs that are compared on the same, most idle cores."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

LOOK = 0.1  # the seconds over which the load of cores is measured


@contextmanager
def on_idle_cores(count: int) -> Iterator[None]:
    """Pin this thread, and threads that it starts, to the ``count`` most idle cores.

    A scheduler tends to wake a thread on the core where it ran before. If another process keeps one core busy, it would slow
    down one run of a group for a whole rehearsal and leave the others alone, which looks like a difference between them.
    New processes, such as a loader's workers, may use all cores.

    Nothing happens if ``count`` is 0, if there are no more cores than that, or if the system does not report their load.

    Args:
        count: the number of cores, >= 0, which is the number of torch threads.
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
    """Return each core's busy time in clock ticks, from Linux's ``/proc/stat``; empty on other systems."""
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
