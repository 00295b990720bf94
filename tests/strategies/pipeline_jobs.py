"""What the pipeline tests run in several gloo processes: one start serves all cases of a pipeline size."""

import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.strategies.pipeline_around import CASES


def launch(world_size: int, names: list[str], *, timeout: float = 600) -> list[dict[str, Any]]:
    """Run cases in ``world_size`` gloo processes.

    Returns:
        Of each rank, what its cases returned, by name; a case that failed is ``{"error": traceback}``.

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
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            log = Path(directory, f"rank{rank}.log")
            logs.append(log)
            with log.open("w") as out:
                command = [sys.executable, "-m", "tests.strategies.pipeline_jobs", directory, *names]
                processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        try:
            codes: Any = [process.wait(timeout=timeout) for process in processes]
        except subprocess.TimeoutExpired:
            codes = "timeout"
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        printed = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
        assert codes == [0] * world_size, f"exit codes {codes}\n{printed}"
        return json.loads(Path(directory, "result.json").read_text())


def main(directory: str, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    results: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(name, results[name]["error"], flush=True)  # in case the other ranks wait for ever
        dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        Path(directory, "result.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
