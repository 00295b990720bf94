"""Starts gloo processes that run jobs of a file in this folder, and what such jobs share."""

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import processes
from tests.cases import ALL


def launch(*requests: str, of: str = "communication_jobs", world_size: int = 2, **env: str) -> dict[str, Any]:
    """Run each request, ``"job"`` or ``"job:name"`` of a file here, in ``world_size`` gloo processes.

    Returns:
        What rank 0 found, by request.
    """
    return processes.launch(
        f"tests.strategies.{of}", *requests, world_size=world_size, timeout=840, env=env, forked=True
    )


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def alike(vector: Tensor) -> bool:
    """Whether all ranks hold the same."""
    others = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(others, vector)
    return all(torch.equal(vector, other) for other in others)


@contextmanager
def counting() -> Iterator[dict[str, float]]:
    """Count the bytes that each collective is given, by what a ring or a pairwise exchange of them sends."""
    world = dist.get_world_size()
    factor = {
        "all_reduce": (0, 2 * (world - 1) / world),
        "all_to_all_single": (1, (world - 1) / world),
        "all_gather_into_tensor": (1, world - 1),
    }
    sums = dict.fromkeys(factor, 0.0)
    originals = {name: getattr(dist, name) for name in factor}

    def counted(name: str) -> Any:
        position, times = factor[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            sums[name] += args[position].numel() * args[position].element_size() * times
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in factor:
            setattr(dist, name, counted(name))
        yield sums
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def neutral() -> list[Any]:
    """A technique that does nothing, for its session: it makes the loader and the random state resumable."""
    return [ALL["LatestWeightAveraging"].neutral()]


def main(jobs_of: tuple[Any, ...]) -> None:
    """Run the jobs that the command line names, and write what they found."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    directory, *jobs = sys.argv[1:]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    root = Path(directory)
    named = {job.__name__: job for job in jobs_of}
    result: dict[str, Any] = {}
    for request in jobs:
        job, _, name = request.partition(":")
        result[request] = named[job](name, root)
    if dist.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
