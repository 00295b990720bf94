"""A process that does a bench's jobs: a JSON line in for each group, JSON lines out, all else into a log."""

import ctypes
import gc
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
from typing import IO, Any

MARK = "@lightning_eff.bench "
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main() -> None:
    """Do the jobs that standard input names until it ends; what the user's code prints goes to the log in argv[1].

    Standard input ends in the middle of a job only if the bench was killed: then this process ends at once, too.
    """
    _die_with(int(sys.argv[2]))
    out = os.fdopen(os.dup(1), "w")
    orders = os.fdopen(os.dup(0), "r")
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what the user's code reads is not the bench's orders
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(orders, lines, busy), daemon=True).start()

    def tell(**message: Any) -> None:
        out.write(MARK + json.dumps(message) + "\n")
        out.flush()

    import torch

    from lightning_eff.bench.running.jobs import Job, work_all

    told: dict[str, float] = {}

    def progress(job: Job, u: float) -> None:
        if u - told.get(job.name, 0.0) >= 0.005 or u >= 1.0:
            told[job.name] = u
            tell(job=job.name, u=u)

    while (line := lines.get()) is not None:
        try:
            records = work_all([Job.of(record) for record in json.loads(line)], progress)
        except KeyboardInterrupt:
            os._exit(130)  # the thread that listens is not to be waited for
        busy.clear()
        tell(done=records)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when the bench is gone, whatever it is doing; elsewhere :func:`_listen` must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)


def _listen(orders: IO[str], lines: "queue.SimpleQueue[str | None]", busy: threading.Event) -> None:
    """Hand on what the bench orders; if it dies in the middle of a job, end this process and its loaders' workers."""
    for line in orders:
        busy.set()
        lines.put(line)
    if busy.is_set():
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)
    lines.put(None)
