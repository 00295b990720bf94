"""Runs a job of any module in gloo processes: what :mod:`tests.processes` starts for the hybrid strategy's tests."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import processes

_HERE = "tests.strategies.launch"


def launch(module: str, job: str, *arguments: Any, world_size: int, timeout: float = 3600) -> dict[str, Any]:
    """What rank 0's ``job`` of ``module`` returned, run in ``world_size`` processes with ``arguments`` (JSON)."""
    return processes.launch(
        _HERE, module, job, json.dumps(arguments), world_size=world_size, timeout=timeout, forked=True
    )


def start(module: str, job: str, *arguments: Any, **kwargs: Any) -> tuple[list[int | str], list[str], Any]:
    """As :func:`launch`, whatever the processes' end; see :func:`tests.processes.start`."""
    return processes.start(_HERE, module, job, json.dumps(arguments), **kwargs)


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
