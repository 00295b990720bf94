"""Jobs for two processes: one start of the processes serves many fits."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def launch(job: str, *names: str, world_size: int = 2, timeout: float = 600) -> dict[str, Any]:
    """Run the function ``job`` of ``tests.ddp_jobs`` on ``names`` in each of ``world_size`` gloo processes.

    Returns:
        What rank 0's job returned, by name.

    Raises:
        AssertionError: if a process fails or they do not end in time, with what they printed.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        processes, logs = [], []
        for rank in range(world_size):
            env = {
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
            log = Path(directory, f"rank{rank}.log")
            logs.append(log)
            with log.open("w") as out:
                command = [sys.executable, "-m", "tests.ddp_jobs", directory, job, *names]
                processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout=timeout) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["timeout"]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        printed = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
        assert codes == [0] * world_size, f"{job} {names}: exit codes {codes}\n{printed}"
        return json.loads(Path(directory, "result.json").read_text())
