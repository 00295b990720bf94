"""The same places on a cluster, by Ray: one job at a time on each worker, and a lost worker's job runs again."""

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

AGAIN = 3  # times that a job whose worker was lost is begun anew


def require_extra() -> Any:
    """Ray, which only a search on a cluster needs.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("--engine ray", str(error.name), "ray"), name=error.name) from None
    return ray


def connect(cpus: int) -> Any:
    """Ray, connected to the cluster that this machine belongs to or ``RAY_ADDRESS`` names, or else to one of its own.

    Args:
        cpus: that a cluster of its own says it has, at least.
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
    """How many workers the cluster has room for: one a GPU, or where there is none, one for so many of its cores."""
    return max(1, _room(connect(threads).nodes(), threads))


class RayPlaces:
    """:class:`Places` on the workers of a Ray cluster, which is started on this machine where there is none.

    Each worker does its jobs in a process beside it, as on one machine, so that what comes of them is the same. All nodes
    must have this environment and the current folder under the same path, such as on a file system that they share.

    Args:
        count: how many workers.
        threads: torch's in each, and cores that each asks the cluster for; 0 for one.
        logs: the folder for what the jobs print.

    Raises:
        UsageError: the cluster has no room for so many.
    """

    def __init__(self, count: int, threads: int, logs: Path) -> None:
        cpus = max(threads, 1)
        self._ray = ray = connect(count * cpus)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        if (room := _room(ray.nodes(), cpus)) < count:
            raise UsageError(
                f"Got {count} runs at once with {cpus} thread(s) each; the Ray cluster has room for {room}. Lower --jobs or"
                " --threads, or add nodes to it."
            )
        host = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=AGAIN)(_Host)
        self.logs = str(logs.absolute())
        place = (os.getcwd(), os.pathsep.join(filter(None, sys.path)), threads, self.logs)
        self._all = [host.remote(*place) for _ in range(count)]
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for one in self._all:
            self._free.put(one)

    def do(self, jobs: Sequence[Job], progress: Callable[[Job, float], None] | None = None) -> list[dict[str, Any]]:
        """As :meth:`Places.do`; each record has ``heard_seconds``, from the first to the last that was heard of the jobs.

        ``progress`` is called once, at the end: the worker is what listens.
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
        """Wait until every process is there.

        Raises:
            UsageError: a node lacks the current folder.
        """
        try:
            self._ray.get([host.start.remote() for host in self._all])
        except self._ray.exceptions.RayActorError as error:
            raise UsageError(
                f"A worker of the Ray cluster does not start: {_line(error)}. All nodes need this environment and the folder"
                f" {os.getcwd()}."
            ) from None

    def close(self) -> None:
        """End them, whatever they do."""
        for host in self._all:
            self._ray.kill(host, no_restart=True)


class _Host:
    """What a Ray worker does: it hands jobs to a process of its own, which trains, and listens to it."""

    def __init__(self, folder: str, path: str, threads: int, logs: str) -> None:
        os.chdir(folder)
        name = f"{socket.gethostname()}-{os.getpid()}"
        self._workers = Workers(1, threads, Path(logs) / name, {"PYTHONPATH": path})

    def start(self) -> int:
        """Wait for the process; the id of this one."""
        list(self._workers.together([], lambda job, u: None))
        return os.getpid()

    def do(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        heard: list[float] = []
        every = [Job.of(job) for job in jobs]
        done = list(self._workers.together(every, lambda job, u: heard.append(time.perf_counter())))
        seconds = heard[-1] - heard[0] if heard else 0.0
        return [{**record, "heard_seconds": seconds} for _, record in done]


def _room(nodes: Sequence[Mapping[str, Any]], cpus: int) -> int:
    """How many workers fit on the nodes of a cluster, each whole on one: with so many cores, and a GPU if there are any."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = any(one.get("GPU", 0) >= 1 for one in alive)
    room = [(int(one.get("CPU", 0)) // cpus, int(one.get("GPU", 0))) for one in alive]
    return sum(min(cores, devices) if gpus else cores for cores, devices in room)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
