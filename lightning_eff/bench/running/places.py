"""Where trials are trained: worker processes that stay, each with one job at a time, on this machine's devices."""

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.workers import Workers, environments


class Places:
    """Worker processes that stay from job to job; who asks waits for one that is free.

    Where the machine has several CUDA devices, each process sees one of them, in turn.

    Args:
        count: how many.
        threads: torch's in each; 0 leaves them.
        logs: the folder for what the jobs print.
    """

    def __init__(self, count: int, threads: int, logs: Path) -> None:
        self._all = [Workers(1, threads, logs / str(i), own) for i, own in enumerate(environments(count))]
        self._free: queue.SimpleQueue[Workers] = queue.SimpleQueue()
        for workers in self._all:
            self._free.put(workers)

    def do(self, jobs: Sequence[Job], progress: Callable[[Job, float], None] | None = None) -> list[dict[str, Any]]:
        """The records of jobs that are done in one process, several in turns of a few steps."""
        workers = self._free.get()
        try:
            done = workers.together(jobs, progress or (lambda job, u: None))
            return [record for _, record in done]
        finally:
            self._free.put(workers)

    def start(self) -> None:
        """Wait until every process is there."""
        for workers in self._all:
            list(workers.together([], lambda job, u: None))

    def close(self) -> None:
        """End them, whatever they do."""
        for workers in self._all:
            workers.close()
