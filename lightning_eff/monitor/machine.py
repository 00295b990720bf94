"""The machine of a run: its fingerprint and its memory."""

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

PROC = Path("/proc")
SAME_MACHINE = ("cpu", "cores", "gpu", "threads")  #: the entries of a fingerprint that identify a machine


def fingerprint(threads: int) -> dict[str, Any]:
    """Return the machine and the versions behind a result, stored as a results file's ``machine``.

    Args:
        threads: the number of threads that torch uses, >= 1.
    """
    cuda = torch.cuda.is_available()
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": driver() if cuda else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "lightning")},
        "lightning_eff": _version("lightning-eff"),
        "git": git_state(Path.cwd()),
        "threads": threads,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # such as a source tree on the path


def _cpu() -> str:
    with suppress(OSError):
        found = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", (PROC / "cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def driver() -> str | None:
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    printed = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return printed.splitlines()[0].strip() if printed else None


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """Return the output of a command, or None if it fails or is missing."""
    try:
        return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return ``{"revision": ..., "dirty": ...}`` of the repository around ``folder``, or None without one."""
    revision = _output("git", "rev-parse", "HEAD", cwd=folder)
    status = _output("git", "status", "--porcelain", cwd=folder)
    if revision is None or status is None:
        return None
    return {"revision": revision.strip(), "dirty": bool(status.strip())}


# -- memory


class Memory(NamedTuple):
    """Bytes that are ``"allocated"`` by torch on its device, or ``"resident"`` in the whole process."""

    bytes: int
    kind: str


def peak_memory(device: torch.device | None = None) -> Memory:
    """Return the peak since :func:`reset_peak_memory`: torch's on a CUDA device, else the process's resident memory."""
    if device is not None and device.type == "cuda":
        return Memory(torch.cuda.max_memory_allocated(device), "allocated")
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", (PROC / "self/status").read_text(), re.MULTILINE)
        if found:
            return Memory(int(found[1]) * 1024, "resident")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident")


def reset_peak_memory(device: torch.device | None = None) -> bool:
    """Reset the peak, and return False if the system cannot; it is then the whole process's."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        (PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_in_use(device: torch.device | None = None) -> int:
    """Return the bytes in use, of the same kind as :func:`peak_memory`; 0 if unknown."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):
        return int((PROC / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
