"""Worker processes on a Ray cluster, each with one job at a time. The job of a lost worker runs again."""

import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import UsageError
from lightning_eff._core._lightning.extras import missing
from lightning_eff.bench.running.jobs import Job, crashed
from lightning_eff.bench.running.workers import Workers

AGAIN = 3  # how often a job is restarted if its worker is lost


def require_extra() -> Any:
    """Import Ray, which only a search on a cluster needs.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("--engine ray", str(error.name), "ray"), name=error.name) from None
    return ray


def connect(cpus: int) -> Any:
    """Connect Ray to this machine's cluster or that of ``RAY_ADDRESS``, or start a local one.

    Args:
        cpus: the least number of CPUs that a local cluster offers.
    """
    ray = require_extra()
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            ray.init(address="local", num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, **quiet)
    return ray


def capacity(threads: int) -> int:
    """Return the number of workers that fit on the cluster: one per GPU, or without GPUs one per ``threads`` cores."""
    return max(1, _room(connect(threads).nodes(), threads))


class RayPlaces:
    """:class:`Places` on the workers of a Ray cluster. Without a cluster, a local one is started.

    Each worker does its jobs in a separate process, as on one machine, so that the results are the same. All nodes need this
    environment and the current folder under the same path, such as on a shared file system.

    Args:
        count: the number of workers.
        threads: the number of torch threads of each, which is also the number of requested cores; 0 requests one.
        logs: the folder for the jobs' output.

    Raises:
        UsageError: if the cluster has no room for so many workers.
    """

    def __init__(self, count: int, threads: int, logs: Path) -> None:
        cpus = max(threads, 1)
        self._ray = ray = connect(count * cpus)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        if (room := _room(ray.nodes(), cpus)) < count:
            raise UsageError(
                f"Got {count} parallel runs with {cpus} thread(s) each, but the Ray cluster has room for {room}. Lower --jobs"
                " or --threads, or add nodes."
            )
        host = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=AGAIN)(_Host)
        self.logs = str(logs.absolute())
        place = (os.getcwd(), os.pathsep.join(filter(None, sys.path)), threads, self.logs)
        self._all = [host.remote(*place) for _ in range(count)]
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for one in self._all:
            self._free.put(one)

    def do(self, jobs: Sequence[Job], progress: Callable[[Job, float], None] | None = None) -> list[dict[str, Any]]:
        """Do jobs like :meth:`Places.do`.

        Each record has ``heard_seconds``, the time between the first and the last progress of the jobs. ``progress`` is called
        once, at the end.
        """
        host = self._free.get()
        try:
            records = self._ray.get(host.do.remote([job.record() for job in jobs]))
        except self._ray.exceptions.RayActorError as error:
            return [crashed(job, f"its worker was lost {AGAIN + 1} times: {_line(error)}") for job in jobs]
        finally:
            self._free.put(host)
        for job in jobs if progress is not None else ():
            progress(job, 1.0)  # pyright: ignore[reportOptionalCall]
        return records

    def start(self) -> None:
        """Wait until every process has started.

        Raises:
            UsageError: if a node lacks the current folder.
        """
        try:
            self._ray.get([host.start.remote() for host in self._all])
        except self._ray.exceptions.RayActorError as error:
            raise UsageError(
                f"A worker of the Ray cluster cannot start: {_line(error)}. All nodes need this environment and the folder"
                f" {os.getcwd()}."
            ) from None

    def close(self) -> None:
        """Kill all workers."""
        for host in self._all:
            self._ray.kill(host, no_restart=True)


class _Host:
    """A Ray worker, which gives jobs to a separate process and waits for their records."""

    def __init__(self, folder: str, path: str, threads: int, logs: str) -> None:
        os.chdir(folder)
        name = f"{socket.gethostname()}-{os.getpid()}"
        self._workers = Workers(1, threads, Path(logs) / name, {"PYTHONPATH": path})

    def start(self) -> int:
        """Wait for the process, and return the id of this one."""
        list(self._workers.together([], lambda job, u: None))
        return os.getpid()

    def do(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        heard: list[float] = []
        every = [Job.of(job) for job in jobs]
        done = list(self._workers.together(every, lambda job, u: heard.append(time.perf_counter())))
        seconds = heard[-1] - heard[0] if heard else 0.0
        return [{**record, "heard_seconds": seconds} for _, record in done]


def _room(nodes: Sequence[Mapping[str, Any]], cpus: int) -> int:
    """Return how many workers with ``cpus`` cores each, and a GPU each if there are GPUs, fit on the nodes of a cluster."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = any(one.get("GPU", 0) >= 1 for one in alive)
    room = [(int(one.get("CPU", 0)) // cpus, int(one.get("GPU", 0))) for one in alive]
    return sum(min(cores, devices) if gpus else cores for cores, devices in room)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
