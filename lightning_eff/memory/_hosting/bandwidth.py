"""How fast copies between a device and the host's memory are."""

import time
from statistics import median

import torch
from torch import Tensor


def measure_bandwidth(
    device: torch.device | str, *, num_bytes: int = 1 << 26, num_copies: int = 5
) -> tuple[float, float]:
    """Bytes per second of copies from ``device`` to the host and back, each the median of several.

    Args:
        device: on CUDA the host memory is pinned; on the CPU both are copies within host memory.
        num_bytes: how much to copy at a time.
        num_copies: how often.
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
    for _ in range(num_copies + 1):  # the first touches the memory
        out.append(seconds(host, here))
        home.append(seconds(here, host))
    return num_bytes / median(out[1:]), num_bytes / median(home[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
