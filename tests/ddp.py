"""Jobs for two processes: one start of the processes serves many fits."""

from typing import Any

from tests import processes


def launch(job: str, *names: str, world_size: int = 2, timeout: float = 600) -> dict[str, Any]:
    """What rank 0's job returned, by name: the function ``job`` of ``tests.ddp_jobs``, run on ``names``."""
    return processes.launch("tests.ddp_jobs", job, *names, world_size=world_size, timeout=timeout, forked=True)
