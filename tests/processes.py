"""Starts gloo processes as torchrun would: one start serves many cases."""

import atexit
import contextlib
import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Any


def processor_seconds() -> float:
    """What this process, those of its children that ended, and ended launches have had of processors, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + FORKS.seconds


def free_port() -> int:
    """A TCP port that nobody listens on. Systems give connections ports from 32,768 on, also before a process uses this one."""
    while True:
        port = SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would put into the environment of one process of a single machine."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }


def launch(
    module: str,
    *arguments: str,
    world_size: int = 2,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
    forked: bool = False,
) -> Any:
    """Run ``python -m module directory *arguments`` in each of ``world_size`` processes.

    Args:
        module: what is run.
        arguments: of its command line, behind the directory.
        world_size: processes.
        timeout: seconds for each of them.
        env: added to the environment.
        forked: start them as forks of one process, which saves the others' imports; see :mod:`tests.forked`.

    Returns:
        What rank 0 wrote as JSON into ``result.json`` of the directory.

    Raises:
        AssertionError: if a process fails or they do not end in time, with what they printed.
    """
    run = fork if forked else start
    codes, logs, result = run(module, *arguments, world_size=world_size, timeout=timeout, env=env)
    printed = "\n".join(f"--- rank {rank}\n{log[-4000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * world_size, f"{module} {arguments}: exit codes {codes}\n{printed}"
    assert result is not None, f"{module} {arguments}: no result"
    return result


def start(
    module: str,
    *arguments: str,
    world_size: int,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[list["subprocess.Popen[bytes]"], list[Path]], None] | None = None,
) -> tuple[list[int | str], list[str], Any]:
    """As :func:`launch`, whatever the processes' end.

    Args:
        module: what is run.
        arguments: of its command line, behind the directory.
        world_size: processes.
        timeout: seconds for each of them.
        env: added to the environment.
        meanwhile: called with the running processes and the files that they print to.

    Returns:
        Exit codes ("timeout" for those that did not end and were killed), what each printed, and rank 0's result.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        processes, logs = [], []
        for rank in range(world_size):
            logs.append(Path(directory, f"rank{rank}.log"))
            with logs[-1].open("w") as out:
                settings = {**environment(rank, world_size, port), **(env or {})}
                command = [sys.executable, "-m", module, directory, *arguments]
                processes.append(subprocess.Popen(command, env=settings, stdout=out, stderr=subprocess.STDOUT))
        codes: list[int | str] = []
        try:
            if meanwhile is not None:
                meanwhile(processes, logs)
            for process in processes:
                codes.append(process.wait(timeout=timeout))
        except subprocess.TimeoutExpired:
            codes += ["timeout"] * (world_size - len(codes))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        result = Path(directory, "result.json")
        return codes, [log.read_text() for log in logs], json.loads(result.read_text()) if result.is_file() else None


#: how names of variables begin that imports look at: forks of a process that was started with other values would not know
READ = ("BNB", "CUDA", "DS_", "HF_", "LIGHTNING_EFF", "OMP_", "PYTHON", "TORCH", "TRITON")


class Forks:
    """The process of :mod:`tests.forked` that this one's launches are forks of, started by the first of them.

    Attributes:
        seconds: of processors, that ended launches of it had.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._settings: Any = None

    def _started(self) -> "subprocess.Popen[str]":
        """As it was started in this environment, which imports may have looked at, or anew."""
        settings = {name: value for name, value in os.environ.items() if name.startswith(READ)}, os.getcwd()
        if self._process is None or self._process.poll() is not None or settings != self._settings:
            self.stop()
            self._settings = settings
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked"],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process

    def run(self, timeout: float, **asked: Any) -> bool:
        """Let it run what is asked for; whether that ended in time."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        printed = process.stdout
        threading.Thread(target=lambda: [answers.put(printed.readline()) for _ in range(2)], daemon=True).start()
        in_time, end = True, time.monotonic() + timeout
        head = answers.get()
        assert head, "tests.forked ended before it had begun: see what it printed"
        try:
            taken = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            in_time = False
            os.killpg(int(head), signal.SIGKILL)
            taken = answers.get()
        self.seconds += float(taken or 0)
        return in_time

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            self.seconds = 0.0  # they are among those of a child that has ended, now


FORKS = Forks()
atexit.register(FORKS.stop)


def fork(
    module: str, *arguments: str, world_size: int, timeout: float = 600, env: Mapping[str, str] | None = None
) -> tuple[list[int | str], list[str], Any]:
    """As :func:`start`, by forks of one process; all have ``timeout`` seconds together."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {**os.environ, **(env or {}), "OMP_NUM_THREADS": "1"}
        asked = {"port": free_port(), "world_size": world_size, "module": module, "directory": directory}
        in_time = FORKS.run(timeout, **asked, arguments=list(arguments), env=settings, cwd=os.getcwd())
        ended = Path(directory, "codes.json")
        codes: list[int | str] = [1 if in_time else "timeout"] * world_size
        if ended.is_file():
            codes = json.loads(ended.read_text())
        head = Path(directory, "head.log")
        logs = [Path(directory, f"rank{rank}.log") for rank in range(world_size)]
        texts = [log.read_text() if log.is_file() else head.read_text() for log in logs]
        result = Path(directory, "result.json")
        return codes, texts, json.loads(result.read_text()) if result.is_file() else None


def once(directory: Path, name: str, run: Callable[[], Any]) -> Any:
    """``run()``, which gives JSON, called by the first of the processes that ask; the others wait for what it gave.

    Args:
        directory: one that all of them have.
        name: of what is asked for.
        run: what starts processes. Where it raises an AssertionError, all of them raise it.
    """
    result = directory / f"{name}.json"
    with Path(directory, f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.is_file():
            try:
                found = {"result": run()}
            except AssertionError as error:
                found = {"error": str(error)}
            result.write_text(json.dumps(found))
    found = json.loads(result.read_text())
    assert "error" not in found, found["error"]
    return found["result"]
