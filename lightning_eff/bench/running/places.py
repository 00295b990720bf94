"""Worker processes for trials on this machine's devices, each with one job at a time."""

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.workers import Workers, environments


class Places:
    """Worker processes that stay from job to job. Callers wait for a free one.

    On a machine with several CUDA devices, each process sees one of them.

    Args:
        count: the number of processes.
        threads: the number of torch threads in each; 0 leaves it unchanged.
        logs: the folder for the jobs' output.
    """

    def __init__(self, count: int, threads: int, logs: Path) -> None:
        self._all = [Workers(1, threads, logs / str(i), own) for i, own in enumerate(environments(count))]
        self._free: queue.SimpleQueue[Workers] = queue.SimpleQueue()
        for workers in self._all:
            self._free.put(workers)

    def do(self, jobs: Sequence[Job], progress: Callable[[Job, float], None] | None = None) -> list[dict[str, Any]]:
        """Do jobs in one process and return their records. Several jobs take turns of a few steps."""
        workers = self._free.get()
        try:
            done = workers.together(jobs, progress or (lambda job, u: None))
            return [record for _, record in done]
        finally:
            self._free.put(workers)

    def start(self) -> None:
        """Wait until every process has started."""
        for workers in self._all:
            list(workers.together([], lambda job, u: None))

    def close(self) -> None:
        """Kill all processes."""
        for workers in self._all:
            workers.close()
