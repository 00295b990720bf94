"""The machine's figures: peaks, fingerprint, memory, and energy from counters made up for the test."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.monitor import machine
from lightning_eff.monitor.energy import EnergyMeter
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.monitor.peaks import measured_peak, peak_flops, sheet_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),  # Volta has no bfloat16 matrix units
        ("Tesla T4", "float16", 65),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", None),  # another GPU, with about half of it
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA L4", "bfloat16", 121),  # the sheet's 242 is with sparsity
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090", "float16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "float16", None),
        ("NVIDIA GeForce RTX 4090", "float16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "float16", None),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 NVL", "bfloat16", None),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA H200", "float32", 67),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA B200", "bfloat16", 2250),
        ("AMD Instinct MI250X", "bfloat16", 191.5),  # one of its two dies
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_peaks_are_the_dense_ones_of_the_data_sheets(name: str, dtype: str, teraflops: float | None) -> None:
    found = sheet_peak(name, dtype)
    if teraflops is None:
        assert found is None
    else:
        assert found is not None
        assert found.flops == pytest.approx(teraflops * 1e12)
        assert ("NVIDIA" in found.source) != ("AMD" in found.source)


def test_a_cuda_device_is_looked_up_by_its_name_and_tf32_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda", 0)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops(device, torch.float32) == (67e12, "float32", "NVIDIA H200 Tensor Core GPU Datasheet (SXM)")
        torch.set_float32_matmul_precision("high")
        found = peak_flops(device, torch.float32)
        assert found is not None
        assert found[:2] == (494.5e12, "tf32")
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cpu_has_a_measured_peak_only() -> None:
    assert peak_flops(CPU, torch.float32) is None
    torch.manual_seed(3)
    state = torch.get_rng_state()
    peak = measured_peak(CPU, torch.float32, seconds=0.05)
    assert (peak.dtype, peak.source) == ("float32", "measured")
    assert 1e8 < peak.flops < 1e14
    assert torch.equal(torch.get_rng_state(), state)


def test_the_peak_is_measured_on_random_numbers_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers need less power, and a GPU that is given them clocks higher than in training."""
    sizes, product = set(), torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.add(a.shape[0])
        for operand in (a, b):
            assert 0.9 < operand.std() < 1.1 and abs(operand.mean()) < 0.1
        assert not torch.equal(a, b)
        return product(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    measured_peak(CPU, torch.float32, seconds=0.01)
    assert len(sizes) >= 2


def test_fingerprint_has_the_fields_of_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fingerprint(3)["git"] is None
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run(["git", "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    clean = fingerprint(3)
    (tmp_path / "a").write_text("2")
    dirty = fingerprint(3)
    assert len(clean["git"]["revision"]) == 40 and clean["git"]["dirty"] is False
    assert dirty["git"] == {"revision": clean["git"]["revision"], "dirty": True}
    assert list(clean) == [
        *("cpu", "cores", "memory_bytes", "gpu", "driver", "os", "python", "torch", "lightning", "lightning_eff"),
        *("git", "threads"),
    ]
    assert clean["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (clean["threads"], clean["cores"]) == (3, os.cpu_count())
    assert clean["cpu"] and clean["memory_bytes"] > 2**28
    if not torch.cuda.is_available():
        assert clean["gpu"] is None and clean["driver"] is None


def test_the_cpu_model_is_that_of_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Chip @ 2 GHz\nmodel name\t: other\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert fingerprint(1)["cpu"] == "A Chip @ 2 GHz"


def test_resident_memory_is_read_from_proc_and_reset_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t 1024 kB\n")
    (tmp_path / "self/statm").write_text("100 7 1 1 0 1 0\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine.peak_memory() == (2048 * 1024, "resident")
    assert machine.memory_in_use(CPU) == 7 * os.sysconf("SC_PAGE_SIZE")
    assert machine.reset_peak_memory(CPU) is True
    assert (tmp_path / "self/clear_refs").read_text() == "5"
    monkeypatch.setattr(machine, "PROC", tmp_path / "nowhere")
    assert machine.reset_peak_memory() is False
    assert machine.memory_in_use() == 0
    assert machine.peak_memory().bytes > 2**24  # the system's own account of this process


def zone(root: Path, path: str, name: str, energy: int, limit: int = 1_000_000_000) -> Path:
    folder = root / path
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", limit)):
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def test_energy_is_that_of_packages_and_memory_with_wrap_around(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 5_000_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 0)  # part of the package
    system = zone(tmp_path, "intel-rapl:2", "psys", 0)  # holds the packages
    with EnergyMeter(rapl=tmp_path) as meter:
        assert meter.started
        assert meter.joules == 0.0
        package.write_text("999000000")  # +9 J
        core.write_text("7000000")
        system.write_text("90000000")
        assert meter.read() == pytest.approx(9.0)
        package.write_text("2000000")  # wraps: 1 J to the top, 2 J on
        other.write_text("500000")  # +0.5 J
        memory.write_text("6250000")  # +1.25 J
    assert meter.joules == pytest.approx(9.0 + 3.0 + 0.5 + 1.25)
    assert meter.sources == ["RAPL package-0", "RAPL dram", "RAPL package-1"]
    package.write_text("3000000")
    assert meter.read() == pytest.approx(13.75)  # stopped
    assert not meter.started
    meter.start()
    assert meter.read() == 0.0


def test_a_machine_that_tells_nothing_gives_none(tmp_path: Path) -> None:
    broken = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    broken.unlink()
    with EnergyMeter(CPU, rapl=tmp_path) as meter:
        pass
    assert meter.joules is None and meter.sources == []


class FakeNvml:
    """A GPU at 100 W, then 300 W; with a counter or without."""

    class NVMLError(Exception):
        pass

    def __init__(self, counter: list[int] | None) -> None:
        self.counter, self.milliwatts, self.asked = counter, [100_000, 300_000], []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.counter is None:
            raise self.NVMLError("not supported")
        return self.counter.pop(0)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self.milliwatts.pop(0)


@pytest.mark.parametrize("counter", [[5_000, 12_500], None])
def test_a_gpu_is_counted_or_its_power_integrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counter: Any
) -> None:
    class Properties:
        uuid = "abc"

    clock = iter([10.0, 14.0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    nvml = FakeNvml(counter)
    meter = EnergyMeter(torch.device("cuda", 0), rapl=tmp_path, nvml=nvml)
    meter.start()
    joules = meter.stop()
    assert nvml.asked == ["GPU-abc"]
    # 5 J to 12.5 J by the counter; a mean of 200 W over 4 s without
    assert joules == pytest.approx(7.5 if counter is not None else 800.0)
    assert meter.sources == ["NVML power, integrated" if counter is None else "NVML energy counter"]
