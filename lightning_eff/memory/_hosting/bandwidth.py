"""Measure the speed of copies between a device and host memory."""

import time
from statistics import median

import torch
from torch import Tensor


def measure_bandwidth(
    device: torch.device | str, *, num_bytes: int = 1 << 26, num_copies: int = 5
) -> tuple[float, float]:
    """Measure bytes per second of copies from ``device`` to the host and back, each the median of several.

    Args:
        device: the device. On CUDA the host memory is pinned; on a CPU both are copies within host memory.
        num_bytes: the size of a copy.
        num_copies: the number of copies.
    """
    device = torch.device(device)
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def seconds(target: Tensor, source: Tensor) -> float:
        _finish(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _finish(device)
        return time.perf_counter() - began

    out, home = [], []
    for _ in range(num_copies + 1):  # the first one only touches the memory
        out.append(seconds(host, here))
        home.append(seconds(here, host))
    return num_bytes / median(out[1:]), num_bytes / median(home[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
