"""The machine a run is on: its fingerprint, its peak FLOP/s, its memory and its energy meters."""

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

RAPL = Path("/sys/class/powercap")
PROC = Path("/proc")


class Peak(NamedTuple):
    """What a device can do at most.

    Attributes:
        flops: FLOP/s, dense, with a multiplication and an addition counted as two.
        dtype: what is multiplied, such as ``"bfloat16"`` or ``"tf32"``.
        source: the data sheet's title, or ``"measured"``.
    """

    flops: float
    dtype: str
    source: str


# Names as torch.cuda.get_device_name gives them, matched in full; TFLOP/s without sparsity and, where a sheet tells
# them apart, with accumulation in float32. Where a sheet gives the figure with sparsity, half of it stands here.
_SHEETS: tuple[tuple[str, str, dict[str, float]], ...] = (
    (
        r"Tesla V100S?-SXM\d.*",
        "NVIDIA V100 Tensor Core GPU Datasheet (SXM2)",
        {"float32": 15.7, "float16": 125},
    ),
    (r"Tesla V100-PCIE.*", "NVIDIA V100 Tensor Core GPU Datasheet (PCIe)", {"float32": 14, "float16": 112}),
    (r"(Tesla|NVIDIA) T4", "NVIDIA T4 Tensor Core GPU Datasheet", {"float32": 8.1, "float16": 65}),
    (
        r"NVIDIA A10",
        "NVIDIA A10 Tensor Core GPU Datasheet",
        {"float32": 31.2, "tf32": 62.5, "float16": 125, "bfloat16": 125},
    ),
    (
        r"(NVIDIA )?A100[- ](SXM4|PCIE|PG509|80GB PCIe).*",
        "NVIDIA A100 Tensor Core GPU Datasheet",
        {"float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312},
    ),
    (
        r"NVIDIA L4",
        "NVIDIA L4 Tensor Core GPU Datasheet",
        {"float32": 30.3, "tf32": 60, "float16": 121, "bfloat16": 121},
    ),
    (
        r"NVIDIA L40S",
        "NVIDIA L40S GPU Datasheet",
        {"float32": 91.6, "tf32": 183, "float16": 362.05, "bfloat16": 362.05},
    ),
    (
        r"NVIDIA GeForce RTX 3090",
        "NVIDIA Ampere GA102 GPU Architecture Whitepaper",
        {"float32": 35.6, "tf32": 35.6, "float16": 71, "bfloat16": 71},
    ),
    (
        r"NVIDIA GeForce RTX 4090",
        "NVIDIA Ada GPU Architecture Whitepaper",
        {"float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2},
    ),
    (
        r"NVIDIA H100 (80GB|SXM5).*",
        "NVIDIA H100 Tensor Core GPU Datasheet (SXM)",
        {"float32": 67, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5},
    ),
    (
        r"NVIDIA H100 PCIe",
        "NVIDIA H100 Tensor Core GPU Datasheet (PCIe)",
        {"float32": 51, "tf32": 378, "float16": 756.5, "bfloat16": 756.5},
    ),
    (
        r"NVIDIA H200",
        "NVIDIA H200 Tensor Core GPU Datasheet (SXM)",
        {"float32": 67, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5},
    ),
    (
        r"NVIDIA B200",
        "NVIDIA Blackwell Datasheet (HGX B200, per GPU)",
        {"float32": 75, "tf32": 1100, "float16": 2250, "bfloat16": 2250},
    ),
    (
        r"AMD Instinct MI250X.*",
        "AMD Instinct MI250X Accelerator Data Sheet (half of it: torch sees each of the two dies as a device)",
        {"float32": 47.85, "float16": 191.5, "bfloat16": 191.5},
    ),
    (
        r"AMD Instinct MI300X.*",
        "AMD Instinct MI300X Accelerator Data Sheet",
        {"float32": 163.4, "tf32": 653.7, "float16": 1307.4, "bfloat16": 1307.4},
    ),
)


def sheet_peak(name: str, dtype: str) -> Peak | None:
    """The peak of the device called ``name`` (as torch calls it) for ``dtype``, or None where no sheet here tells.

    Args:
        name: such as ``"NVIDIA H200"``; a slice of a device (MIG) is another device, of no known peak.
        dtype: ``"float32"``, ``"tf32"``, ``"float16"`` or ``"bfloat16"``.
    """
    if " MIG " in name:
        return None
    for pattern, title, teraflops in _SHEETS:
        if re.fullmatch(pattern, name) and dtype in teraflops:
            return Peak(teraflops[dtype] * 1e12, dtype, title)
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """The device's dense peak by its data sheet, or None: for CPUs, unlisted devices and formats that a device lacks.

    float32 is looked up as TF32 where torch is allowed to multiply so (``torch.set_float32_matmul_precision``).
    """
    if device.type != "cuda":
        return None
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        name = "tf32"
    return sheet_peak(torch.cuda.get_device_name(device), name)


def measured_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> Peak:
    """The best rate of large square matrix products of several sizes, in about ``seconds`` (> 0), labelled ``"measured"``.

    It is what the device gives a program with this many threads, below its sheet's peak. The numbers are random: on equal
    ones a GPU needs less power, and clocks higher than training lets it. The global random state is not touched.
    """
    sizes = (512, 1024) if device.type == "cpu" else (4096, 8192, 16384)  # which one is the fastest, differs
    generator = torch.Generator(device).manual_seed(0)
    best = max(_rate_of_products(device, dtype, size, seconds / len(sizes), generator) for size in sizes)
    return Peak(best, str(dtype).removeprefix("torch."), "measured")


@torch.no_grad()
def _rate_of_products(
    device: torch.device, dtype: torch.dtype, size: int, seconds: float, generator: torch.Generator
) -> float:
    """The best FLOP/s of products of two square matrices of normal numbers."""
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    torch.mm(a, b, out=product)  # warms up
    best, stop, began = float("inf"), 0.0, time.perf_counter()
    while stop - began < seconds:
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=product)
        _synchronize(device)
        stop = time.perf_counter()
        best = min(best, stop - start)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- what is written beside each result


def fingerprint(threads: int) -> dict[str, Any]:
    """The machine and the versions that a result was got with, as in a results file's ``machine``.

    Args:
        threads: that torch computes with, >= 1.
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
    """What a command prints, or None if it fails or is not there."""
    try:
        return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """``{"revision": ..., "dirty": ...}`` of the repository that ``folder`` is in, or None where there is none."""
    revision = _output("git", "rev-parse", "HEAD", cwd=folder)
    status = _output("git", "status", "--porcelain", cwd=folder)
    if revision is None or status is None:
        return None
    return {"revision": revision.strip(), "dirty": bool(status.strip())}


# -- memory


class Memory(NamedTuple):
    """Bytes, and whether they are ``"allocated"`` (by torch on its device) or ``"resident"`` (the whole process)."""

    bytes: int
    kind: str


def peak_memory(device: torch.device | None = None) -> Memory:
    """The most memory since :func:`reset_peak_memory`: torch's on a CUDA device, else the process's resident set."""
    if device is not None and device.type == "cuda":
        return Memory(torch.cuda.max_memory_allocated(device), "allocated")
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", (PROC / "self/status").read_text(), re.MULTILINE)
        if found:
            return Memory(int(found[1]) * 1024, "resident")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident")


def reset_peak_memory(device: torch.device | None = None) -> bool:
    """Let :func:`peak_memory` count anew; False where the system cannot, so that its peak is the whole process's."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        (PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_in_use(device: torch.device | None = None) -> int:
    """Bytes in use now, of the kind that :func:`peak_memory` tells; 0 where the system does not say."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):
        return int((PROC / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


# -- energy


class _Rapl:
    """One zone of Linux's powercap tree: a counter of microjoules that wraps around."""

    def __init__(self, zone: Path) -> None:
        self.name = f"RAPL {(zone / 'name').read_text().strip()}"
        self._zone = zone
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = self._read()

    def _read(self) -> int:
        return int((self._zone / "energy_uj").read_text())

    def joules(self) -> float:
        """Since the last call."""
        now = self._read()
        used = now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return used / 1e6


class _Nvml:
    """One GPU: its counter of millijoules where it has one, else its power, summed up by trapezoids."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        try:
            self._last = float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            self._counts, self.name = True, "NVML energy counter"
        except nvml.NVMLError:
            self._last, self._counts, self.name = self._watts(), False, "NVML power, integrated"
        self._time = time.perf_counter()

    def _watts(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3

    def joules(self) -> float:
        """Since the last call."""
        last, before = self._last, self._time
        self._time = time.perf_counter()
        if self._counts:
            self._last = float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            return (self._last - last) / 1e3
        self._last = self._watts()
        return (last + self._last) / 2 * (self._time - before)


class EnergyMeter:
    """The energy that the machine's own counters say was used, from :meth:`start` to :meth:`stop`.

    RAPL counts whole CPU packages (and memory, where it does), with all that runs on them; NVML counts the one GPU.
    Call :meth:`read` now and then: RAPL's counter wraps around within minutes to hours, and a GPU without a counter
    tells its power of the moment only.

    Args:
        device: the GPU to count, none if it is no CUDA device; None counts torch's current GPU if one is in use.
        rapl: the powercap tree.
        nvml: the module ``pynvml`` or one like it; None imports it if it is installed.
    """

    def __init__(self, device: torch.device | None = None, *, rapl: Path = RAPL, nvml: Any = None) -> None:
        self._device, self._rapl, self._nvml = device, rapl, nvml
        self._meters: list[_Rapl | _Nvml] = []
        self._joules = 0.0
        self._running = False

    def start(self) -> None:
        """Count from zero."""
        self._meters, self._joules = [], 0.0
        for zone in sorted(self._rapl.glob("intel-rapl:*")):
            with suppress(OSError, ValueError):  # a zone that cannot be read (since 2020 root alone may) tells nothing
                if (zone / "name").read_text().strip().startswith(("package", "dram")):  # others are parts of these
                    self._meters.append(_Rapl(zone))
        device = self._device
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        if device is not None and device.type == "cuda":
            self._meters += list(self._gpu(device))
        self._running = True

    def _gpu(self, device: torch.device) -> Iterator[_Nvml]:
        nvml = self._nvml
        if nvml is None:
            try:
                import pynvml as nvml  # pyright: ignore[reportMissingImports]
            except ImportError:
                return
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA's indices may be others than NVML's
            yield _Nvml(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))

    def read(self) -> float | None:
        """Joules since :meth:`start`, or None where nothing on the machine tells."""
        if self._running:
            self._joules += sum(meter.joules() for meter in self._meters)
        return self.joules

    def stop(self) -> float | None:
        """As :meth:`read`; the count stands still from now on, and can still be asked for."""
        joules = self.read()
        self._running = False
        return joules

    @property
    def started(self) -> bool:
        """Whether it counts: after :meth:`start` and before :meth:`stop`."""
        return self._running

    @property
    def joules(self) -> float | None:
        """As of the last :meth:`read`."""
        return self._joules if self._meters else None

    @property
    def sources(self) -> list[str]:
        """What has been counted, by name."""
        return [meter.name for meter in self._meters]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
