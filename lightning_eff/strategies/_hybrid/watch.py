"""A watch over all processes of a run: when one fails or dies, every other one stops with its rank in the message.

A process that waits for a message of one that is gone may wait for the whole timeout of the process group, and what it
says then names an address. So each process keeps a thread that gives a sign of life to a store on rank 0, looks after
its neighbour, and reads what failed.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

_FAILED = "failed"
_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 8.0
_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket")


class Watch:
    """One process's part in the watch.

    Args:
        rank: of this process.
        world: number of processes.
        address: of the machine of rank 0.
        timeout: seconds without a sign of life after which a process counts as dead.
        who: for messages.
    """

    def __init__(self, rank: int, world: int, address: str, timeout: float, *, who: str) -> None:
        self.rank, self.world, self.timeout, self.who = rank, world, timeout, who
        self._store = _store(rank, world, address)
        self._run = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._told = threading.Event()
        self.verdict: str | None = None
        self._store.set(f"who/{rank}", json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))

    def start(self) -> None:
        """Begin to watch; all ranks together."""
        if self._thread is not None:
            return
        self._run += 1
        self._stop, self._told, self.verdict = threading.Event(), threading.Event(), None
        self._thread = threading.Thread(target=self._watch, name=f"{self.who} watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch of this run."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _INTERVAL_SECONDS)
        self._thread = None

    # -- the thread

    def _key(self, name: str) -> str:
        return f"{self._run}/{name}"

    def _watch(self) -> None:
        neighbour, count, seen, since = (self.rank + 1) % self.world, 0, "", time.monotonic()
        lost = 0
        while not self._stop.wait(_INTERVAL_SECONDS):
            try:
                count += 1
                self._store.set(self._key(f"beat/{self.rank}"), str(count))
                if self._store.check([self._key(_FAILED)]):
                    self._store.set(self._key(f"told/{self.rank}"), "1")
                    self._conclude(self._store.get(self._key(_FAILED)).decode())
                    return
                lost = 0
                beat = self._beat(neighbour)
                if beat != seen:
                    seen, since = beat, time.monotonic()
                problem = self._problem(neighbour, time.monotonic() - since)
                if problem is not None:
                    self._post(problem)
            except Exception:  # whatever the store's connection raises
                lost += 1
                if lost < 2 or self._stop.is_set():
                    continue
                self._conclude(f"rank 0, where the watch is kept, {'cannot be reached' if self.rank else 'broke down'}")
                return

    def _beat(self, rank: int) -> str:
        key = self._key(f"beat/{rank}")
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _problem(self, rank: int, silent_seconds: float) -> str | None:
        where = json.loads(self._store.get(f"who/{rank}"))
        named = f"rank {rank} (process {where['pid']} on {where['host']})"
        if where["host"] == socket.gethostname() and not _alive(where["pid"]):
            return f"{named} has died without a message: it was killed, or ran out of memory"
        if silent_seconds > self.timeout:
            return f"{named} has given no sign of life for {silent_seconds:.0f} s"
        return None

    def _post(self, problem: str) -> None:
        self._store.compare_set(self._key(_FAILED), "", problem)

    def _conclude(self, problem: str) -> None:
        """Wake the main thread; end the process if it cannot come out of what it waits in."""
        self.verdict = problem
        if not self._own:
            print(self.message(), file=sys.stderr, flush=True)
        self._told.set()
        _abort()
        if not self._stop.wait(_GRACE_SECONDS):
            os._exit(1)

    # -- the main thread

    @property
    def _own(self) -> bool:
        return self.verdict is None or self.verdict.startswith(f"rank {self.rank} ")

    def message(self) -> str:
        """What this process says when it stops on another one's account."""
        return (
            f"{self.who}: {self.verdict}. This process (rank {self.rank}) stops with it. Look at what that rank printed, and"
            " resume from the last checkpoint: trainer.fit(..., ckpt_path=...)."
        )

    def failed(self, error: BaseException) -> str | None:
        """Tell all others of an exception here, or find out whose it is.

        Returns:
            The message to stop with, if the cause is another rank; None if the exception is this one's own.
        """
        if self._thread is None:
            return None
        consequence = _of_messages(error)
        if self.verdict is None and consequence:
            self._told.wait(self.timeout + 3 * _INTERVAL_SECONDS)
        if self.verdict is None:
            text = f"rank {self.rank} failed: {type(error).__name__}: {str(error) or 'no message'}"
            try:
                self._post(text[:4000])
                self._wait_until_told()
            except Exception as unreachable:  # the others find that out by themselves
                print(f"{self.who}: could not tell the other ranks: {unreachable}", file=sys.stderr)
        message = self.message() if consequence and not self._own else None
        self._stop.set()
        return message

    def _wait_until_told(self) -> None:
        """Rank 0 keeps the store: it stays until all others have read what happened, or do not answer."""
        others = [self._key(f"told/{rank}") for rank in range(self.world) if rank != self.rank]
        end = time.monotonic() + 4 * _INTERVAL_SECONDS
        while self.rank == 0 and time.monotonic() < end and not all(self._store.check([key]) for key in others):
            time.sleep(0.05)


def _store(rank: int, world: int, address: str) -> TCPStore:
    timeout = timedelta(seconds=60)
    port: list[Any] = [None]
    store = None
    if rank == 0:
        store = TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if store is None:
        store = TCPStore(address, port[0], None, False, timeout, wait_for_workers=False)
    return store


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    try:
        return not stat.is_file() or stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _of_messages(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, reads like a message between processes that failed."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, RuntimeError | OSError) and any(word in text for word in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _abort() -> None:
    """End what waits in NCCL; gloo's messages end when the other process does."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, or none of it where others start the processes; what runs tells the watch of exceptions.

    Args:
        watch: the strategy's watch, once it has one.
    """

    def __init__(self, environment: Any, num_processes: int, num_nodes: int, watch: Callable[[], Watch | None]) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._watch = watch

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.cluster_environment.creates_processes_externally

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                watch = self._watch()
                message = None if watch is None else watch.failed(error)
                if message is not None:
                    raise RuntimeError(message) from error
                raise

        return super().launch(watched, *args, trainer=trainer, **kwargs)
