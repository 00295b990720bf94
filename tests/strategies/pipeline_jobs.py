"""What the pipeline tests run in several gloo processes: one start serves all cases of a pipeline size."""

import datetime
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import processes
from tests.strategies.pipeline_around import CASES


def launch(world_size: int, names: list[str], *, timeout: float = 600) -> list[dict[str, Any]]:
    """Run cases in ``world_size`` gloo processes.

    Returns:
        Of each rank, what its cases returned, by name; a case that failed is ``{"error": traceback}``.
    """
    return processes.launch(
        "tests.strategies.pipeline_jobs", *names, world_size=world_size, timeout=timeout, forked=True
    )


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
