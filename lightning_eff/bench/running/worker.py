"""A process that does a bench's jobs. It reads a JSON line per group, writes JSON lines, and logs other output."""

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
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl


def main() -> None:
    """Do the jobs from standard input until it ends. Output of the user's code goes to the log in argv[1].

    Standard input ends during a job only if the bench was killed. Then this process ends at once.
    """
    _die_with(int(sys.argv[2]))
    out = os.fdopen(os.dup(1), "w")
    orders = os.fdopen(os.dup(0), "r")
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the user's code must not read the bench's orders
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(orders, lines, busy), daemon=True).start()

    def send(**message: Any) -> None:
        out.write(MARK + json.dumps(message) + "\n")
        out.flush()

    import torch

    from lightning_eff.bench.running.jobs import Job, work_all

    reported: dict[str, float] = {}

    def progress(job: Job, u: float) -> None:
        if u - reported.get(job.name, 0.0) >= 0.005 or u >= 1.0:
            reported[job.name] = u
            send(job=job.name, u=u)

    while (line := lines.get()) is not None:
        try:
            records = work_all([Job.of(record) for record in json.loads(line)], progress)
        except KeyboardInterrupt:
            os._exit(130)  # does not wait for the listening thread
        busy.clear()
        send(done=records)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when the bench dies. Other systems rely on :func:`_listen`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has already died
            os._exit(1)


def _listen(orders: IO[str], lines: "queue.SimpleQueue[str | None]", busy: threading.Event) -> None:
    """Pass the bench's orders on. If the bench dies during a job, end this process and its loaders' workers."""
    for line in orders:
        busy.set()
        lines.put(line)
    if busy.is_set():
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)
    lines.put(None)
