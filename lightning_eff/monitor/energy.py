"""Energy from the machine's own counters: RAPL for CPUs, NVML for GPUs."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

RAPL = Path("/sys/class/powercap")


class _Rapl:
    """One zone of Linux's powercap tree, with a counter of microjoules that wraps around."""

    def __init__(self, zone: Path) -> None:
        self.name = f"RAPL {(zone / 'name').read_text().strip()}"
        self._zone = zone
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = self._read()

    def _read(self) -> int:
        return int((self._zone / "energy_uj").read_text())

    def joules(self) -> float:
        """Return the joules since the last call."""
        now = self._read()
        used = now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return used / 1e6


class _Nvml:
    """One GPU: its counter of millijoules if it has one, else its power, integrated by trapezoids."""

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
        """Return the joules since the last call."""
        last, before = self._last, self._time
        self._time = time.perf_counter()
        if self._counts:
            self._last = float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            return (self._last - last) / 1e3
        self._last = self._watts()
        return (last + self._last) / 2 * (self._time - before)


class EnergyMeter:
    """Measure energy with the machine's own counters, from :meth:`start` to :meth:`stop`.

    RAPL counts whole CPU packages (and memory, where supported), with everything that runs on them. NVML counts one GPU. Call
    :meth:`read` regularly: RAPL's counter wraps around within minutes to hours, and a GPU without a counter only reports its
    current power.

    Args:
        device: the GPU to measure. No GPU is measured for any other device; None measures torch's current GPU, if one is in
            use.
        rapl: the powercap tree.
        nvml: the module ``pynvml`` or a replacement; None imports it if it is installed.
    """

    def __init__(self, device: torch.device | None = None, *, rapl: Path = RAPL, nvml: Any = None) -> None:
        self._device, self._rapl, self._nvml = device, rapl, nvml
        self._meters: list[_Rapl | _Nvml] = []
        self._joules = 0.0
        self.started = False

    def start(self) -> None:
        """Start counting from zero."""
        self._meters, self._joules = [], 0.0
        for zone in sorted(self._rapl.glob("intel-rapl:*")):
            with suppress(OSError, ValueError):  # some zones cannot be read; since 2020 only root may
                if (
                    (zone / "name").read_text().strip().startswith(("package", "dram"))
                ):  # other zones are parts of these
                    self._meters.append(_Rapl(zone))
        device = self._device
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        if device is not None and device.type == "cuda":
            self._meters += list(self._gpu(device))
        self.started = True

    def _gpu(self, device: torch.device) -> Iterator[_Nvml]:
        nvml = self._nvml
        if nvml is None:
            try:
                import pynvml as nvml  # pyright: ignore[reportMissingImports]
            except ImportError:
                return
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA's indices may differ from NVML's
            yield _Nvml(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))

    def read(self) -> float | None:
        """Return the joules since :meth:`start`, or None without a counter."""
        if self.started:
            self._joules += sum(meter.joules() for meter in self._meters)
        return self.joules

    def stop(self) -> float | None:
        """Stop counting and return the joules, like :meth:`read`."""
        joules = self.read()
        self.started = False
        return joules

    @property
    def joules(self) -> float | None:
        """The joules at the last :meth:`read`, or None without a counter."""
        return self._joules if self._meters else None

    @property
    def sources(self) -> list[str]:
        """The names of the counters."""
        return [meter.name for meter in self._meters]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
