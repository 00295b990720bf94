"""Do a bench's jobs in this process, or in worker processes that may die without harm to others."""

import gc
import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from lightning_eff.bench.running.jobs import KILLED, Job, Progress, crashed, work, work_all
from lightning_eff.bench.running.worker import MARK

Done = Iterator[tuple[Job, dict[str, Any]]]


def environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each of ``count`` processes, which shows it one of this machine's CUDA devices."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    return [{"CUDA_VISIBLE_DEVICES": seen[i % len(seen)]} if len(seen) > 1 else {} for i in range(count)]


class InProcess:
    """Do jobs in this process."""

    def together(self, jobs: Sequence[Job], progress: Progress) -> Done:
        """Do all jobs in turns of a few steps, and yield each with its record."""
        yield from zip(jobs, work_all(jobs, progress), strict=True)
        gc.collect()

    def each(self, jobs: Sequence[Job], progress: Progress) -> Done:
        """Do one job after the other, and yield each with its record."""
        for job in jobs:
            yield job, work(job, lambda u, job=job: progress(job, u))
            gc.collect()

    def close(self) -> None:
        pass


class Workers:
    """Do jobs in other processes: rehearsals in one process in turns, and each run in a new process.

    On a machine with several CUDA devices, parallel runs have one each.

    Args:
        count: the number of parallel runs.
        threads: the number of torch threads in each; 0 leaves it unchanged.
        logs: the folder for the jobs' output.
        environment: additional environment variables. With them, devices are not distributed.
    """

    def __init__(self, count: int, threads: int, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for own in environments(count) if environment is None and count > 1 else [self._environment] * count:
            self._free.put(own)
        self._pool = ThreadPoolExecutor(count)
        self._threads = threads
        self._logs = logs
        self._all: list[_Worker] = []
        self._rehearsing: _Worker | None = None
        self._closed = False
        logs.mkdir(parents=True, exist_ok=True)

    def together(self, jobs: Sequence[Job], progress: Progress) -> Done:
        """Do all jobs in one process in turns of a few steps, and yield each with its record."""
        worker = self._standing()
        records = worker.do(jobs, progress)
        if not worker.alive and len(jobs) > 1:  # find out which job killed it
            records = [record for job in jobs for record in self._standing().do([job], progress)]
        yield from zip(jobs, records, strict=True)

    def each(self, jobs: Sequence[Job], progress: Progress) -> Done:
        """Do each job in a new process, and yield it with its record when it ends."""
        if self._rehearsing is not None:
            self._rehearsing.end()
        pending = {self._pool.submit(self._alone, job, progress): job for job in jobs}
        for done in as_completed(pending):
            yield pending[done], done.result()

    def _alone(self, job: Job, progress: Progress) -> dict[str, Any]:
        environment = self._free.get()
        try:
            worker = self._start(environment)
            (record,) = worker.do([job], progress)
            worker.end()
            return record
        finally:
            self._free.put(environment)

    def _standing(self) -> "_Worker":
        if self._rehearsing is None or not self._rehearsing.alive:
            self._rehearsing = self._start(self._environment)
        return self._rehearsing

    def _start(self, environment: Mapping[str, str]) -> "_Worker":
        log = self._logs / f"worker-{os.getpid()}-{len(self._all) + 1}.log"
        worker = _Worker(log, self._threads, environment)
        self._all.append(worker)
        if self._closed:  # in the meantime
            worker.kill()
        return worker

    def close(self) -> None:
        """Kill all workers, and start no more."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.kill()


Place = InProcess | Workers  #: a place for jobs


class _Worker:
    def __init__(self, log: Path, threads: int, environment: Mapping[str, str]) -> None:
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} if threads else {}
        self.log = log
        begin = "from lightning_eff.bench.running.worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", begin, str(log), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **limits, **environment},
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def do(self, jobs: Sequence[Job], progress: Progress) -> list[dict[str, Any]]:
        """Do jobs and return their records. If the process dies or exceeds its limit, all of them are crashes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        names = {job.name: job for job in jobs}
        limits = [job.limit for job in jobs if job.limit is not None]
        limit = math.fsum(limits) if jobs and len(limits) == len(jobs) else None
        late = threading.Event()
        watch = None if limit is None else threading.Timer(limit, self._end_late, [late])
        try:
            if watch is not None:
                watch.start()
            self._process.stdin.write(json.dumps([job.record() for job in jobs]) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if not line.startswith(MARK):
                    continue
                message = json.loads(line[len(MARK) :])
                if "done" in message:
                    return message["done"]
                progress(names[message["job"]], message["u"])
        except BrokenPipeError:
            pass
        finally:
            if watch is not None:
                watch.cancel()
        status = self._process.wait()
        if late.is_set():
            return [crashed(job, f"{KILLED} {limit:.0f} s, which is too long for its budget") for job in jobs]
        log = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        last = " / ".join(log[-3:]) or "none"
        return [crashed(job, f"its process ended with {cause}; last output: {last}; log: {self.log}") for job in jobs]

    def _end_late(self, late: threading.Event) -> None:
        """Kill the process, because it exceeds its limit."""
        late.set()
        self._process.kill()

    def end(self) -> None:
        """Let the process end, because there are no more jobs."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()

    def kill(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
