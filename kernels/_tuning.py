"""Choose among a few configurations of a kernel by timing them once per kind of call.

Configurations may differ only in speed: they compute the same numbers, so a run does not depend on the choice. The choice
lasts for the process; Triton itself keeps the compiled kernels on disk.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

REPEATS = 5
_chosen: dict[Hashable, object] = {}


def choose(key: Hashable, configurations: Sequence[T], run: Callable[[T], object], device: torch.device) -> T:
    """Return the fastest configuration for calls like this one.

    The first call with a ``key`` runs each configuration a few times and waits for the device. Devices other than GPUs, and
    GPUs that record a CUDA graph, use the first configuration.

    Args:
        key: what decides the time: the kernel, its sizes in steps, and its dtypes.
        configurations: the candidates, the default first.
        run: calls the kernel with one of them; repeated calls must not change the result.
        device: where it runs.
    """
    if len(configurations) == 1 or device.type != "cuda":
        return configurations[0]
    whole = (key, torch.cuda.get_device_name(device))
    if whole not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return configurations[0]
        times = [_milliseconds(run, configuration) for configuration in configurations]
        _chosen[whole] = configurations[times.index(min(times))]
    return _chosen[whole]  # pyright: ignore[reportReturnType] -- stored below the key of these configurations


def step_of(size: int) -> int:
    """Return the power of two that stands for a size in a key."""
    return 1 << max(size - 1, 0).bit_length()


def _milliseconds(run: Callable[[T], object], configuration: T) -> float:
    """Return the time of one run, infinite if the device lacks the shared memory or registers for it."""
    from triton.runtime.errors import OutOfResources

    try:
        run(configuration)  # compiles
    except OutOfResources:
        return float("inf")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPEATS):
        run(configuration)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / REPEATS
