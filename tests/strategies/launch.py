"""Starts gloo processes that run jobs of a module: one start serves many cases, as torchrun would start them."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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


def launch(module: str, job: str, *arguments: Any, world_size: int, timeout: float = 600) -> dict[str, Any]:
    """Run the function ``job`` of ``module`` in each of ``world_size`` processes, with ``arguments`` (JSON).

    Returns:
        What rank 0's job returned.

    Raises:
        AssertionError: if a process fails or they do not end in time, with what they printed.
    """
    codes, logs, result = start(module, job, *arguments, world_size=world_size, timeout=timeout)
    printed = "\n".join(f"--- rank {rank}\n{log[-4000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * world_size, f"{job} {arguments}: exit codes {codes}\n{printed}"
    assert result is not None
    return result


def start(
    module: str,
    job: str,
    *arguments: Any,
    world_size: int,
    timeout: float = 600,
    meanwhile: Callable[[list["subprocess.Popen[bytes]"], list[Path]], None] | None = None,
) -> tuple[list[int | str], list[str], dict[str, Any] | None]:
    """As :func:`launch`, whatever the processes' end.

    Args:
        meanwhile: called with the running processes and the files that they print to.

    Returns:
        Exit codes ("timeout" for those that did not end and were killed), what each printed, and rank 0's result.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        processes, logs = [], []
        for rank in range(world_size):
            log = Path(directory, f"rank{rank}.log")
            logs.append(log)
            with log.open("w") as out:
                command = [
                    sys.executable,
                    "-m",
                    "tests.strategies.launch",
                    directory,
                    module,
                    job,
                    json.dumps(arguments),
                ]
                processes.append(
                    subprocess.Popen(
                        command, env=environment(rank, world_size, port), stdout=out, stderr=subprocess.STDOUT
                    )
                )
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


def main() -> None:
    """In a started process: run the job, and let rank 0 write what it returned."""
    import importlib

    import torch

    torch.set_num_threads(1)
    directory, module, job, arguments = sys.argv[1:]
    result = getattr(importlib.import_module(module), job)(*json.loads(arguments))
    if os.environ["RANK"] == "0":
        Path(directory, "result.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
