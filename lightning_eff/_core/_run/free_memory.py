"""The free memory of a device, for techniques that must refuse a run before it begins."""

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on ``device``; None if unknown.

    On a CPU this is the machine's available memory, or the rest of the process's own limit (cgroup v2) if that is less. The
    memory that training itself will need is not subtracted.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return None
    found = [known for known in (_available(), _left_of_limit()) if known is not None]
    return min(found, default=None)


def _available() -> int | None:
    """Return the machine's available memory, or all its memory if the former is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        known = all(name in getattr(os, "sysconf_names", {}) for name in names)
        return os.sysconf(names[0]) * os.sysconf(names[1]) if known else None


def _left_of_limit(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the rest of this process group's memory limit, if it has one. Cached files count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def in_words(num_bytes: int) -> str:
    """Return a number of bytes as text, such as "1.50 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes} bytes"
