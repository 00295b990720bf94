"""What the processes of the watch's tests run: the watch alone, without a Trainer."""

import ctypes
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lightning_eff.strategies._hybrid.watch import Process, Watch

LISTENING = "0A"


def listening() -> int:
    """How many sockets of this process listen."""
    held = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    tables = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return sum(f"socket:[{line[9]}]" in held for line in tables if line[3] == LISTENING)


def watched(directory: str) -> dict[str, Any]:
    """Rank 0 holds Python's lock for longer than the timeout; then, in containers of their own, rank 1 dies."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # for which gloo opens what it needs
    before = listening()
    watch = Watch(1.0, who="W")
    found: dict[str, Any] = {"opened": listening() - before}
    watch.start()
    dist.barrier()
    if rank == 0:
        ctypes.PyDLL(None).usleep(4_000_000)
    time.sleep(2.5)  # until all have looked again
    found["held"] = [None, None]
    dist.all_gather_object(found["held"], watch.verdict)
    watch.end()

    apart = replace(Process.this(), space=f"container {rank}", pid=1)  # of equal names, and equal ids
    with patch.object(Process, "this", lambda: apart):
        watch = Watch(2.0, who="W")
    watch.start()
    time.sleep(1.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        found["message"] = watch.failed(error)
    watch.end()
    return found
