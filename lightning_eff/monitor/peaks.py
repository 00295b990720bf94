"""The peak FLOP/s of devices: from data sheets, or measured."""

import re
import time
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """The highest FLOP/s of a device.

    Attributes:
        flops: dense FLOP/s, with a multiplication and an addition counted as two.
        dtype: the number format of the factors, such as ``"bfloat16"`` or ``"tf32"``.
        source: the data sheet's title, or ``"measured"``.
    """

    flops: float
    dtype: str
    source: str


# Names from torch.cuda.get_device_name, matched in full. TFLOP/s without sparsity and, where a sheet distinguishes, with
# accumulation in float32. Where a sheet gives the figure with sparsity, this is half of it.
_FORMATS = ("float32", "tf32", "float16", "bfloat16")  # None where a device lacks one
_SHEETS: tuple[tuple[str, str, tuple[float | None, ...]], ...] = (
    (r"Tesla V100S?-SXM\d.*", "NVIDIA V100 Tensor Core GPU Datasheet (SXM2)", (15.7, None, 125, None)),
    (r"Tesla V100-PCIE.*", "NVIDIA V100 Tensor Core GPU Datasheet (PCIe)", (14, None, 112, None)),
    (r"(Tesla|NVIDIA) T4", "NVIDIA T4 Tensor Core GPU Datasheet", (8.1, None, 65, None)),
    (r"NVIDIA A10", "NVIDIA A10 Tensor Core GPU Datasheet", (31.2, 62.5, 125, 125)),
    (
        r"(NVIDIA )?A100[- ](SXM4|PCIE|PG509|80GB PCIe).*",
        "NVIDIA A100 Tensor Core GPU Datasheet",
        (19.5, 156, 312, 312),
    ),
    (r"NVIDIA L4", "NVIDIA L4 Tensor Core GPU Datasheet", (30.3, 60, 121, 121)),
    (r"NVIDIA L40S", "NVIDIA L40S GPU Datasheet", (91.6, 183, 362.05, 362.05)),
    (r"NVIDIA GeForce RTX 3090", "NVIDIA Ampere GA102 GPU Architecture Whitepaper", (35.6, 35.6, 71, 71)),
    (r"NVIDIA GeForce RTX 4090", "NVIDIA Ada GPU Architecture Whitepaper", (82.6, 82.6, 165.2, 165.2)),
    (r"NVIDIA H100 (80GB|SXM5).*", "NVIDIA H100 Tensor Core GPU Datasheet (SXM)", (67, 494.5, 989.5, 989.5)),
    (r"NVIDIA H100 PCIe", "NVIDIA H100 Tensor Core GPU Datasheet (PCIe)", (51, 378, 756.5, 756.5)),
    (r"NVIDIA H200", "NVIDIA H200 Tensor Core GPU Datasheet (SXM)", (67, 494.5, 989.5, 989.5)),
    (r"NVIDIA B200", "NVIDIA Blackwell Datasheet (HGX B200, per GPU)", (75, 1100, 2250, 2250)),
    (
        r"AMD Instinct MI250X.*",
        "AMD Instinct MI250X Accelerator Data Sheet (half of it: torch sees each of the two dies as a device)",
        (47.85, None, 191.5, 191.5),
    ),
    (r"AMD Instinct MI300X.*", "AMD Instinct MI300X Accelerator Data Sheet", (163.4, 653.7, 1307.4, 1307.4)),
)


def sheet_peak(name: str, dtype: str) -> Peak | None:
    """Return the data sheet's peak of the device ``name`` for ``dtype``, or None if it is not listed.

    Args:
        name: torch's name of the device, such as ``"NVIDIA H200"``. A slice of a device (MIG) has no known peak.
        dtype: ``"float32"``, ``"tf32"``, ``"float16"`` or ``"bfloat16"``.
    """
    if " MIG " in name or dtype not in _FORMATS:
        return None
    for pattern, title, teraflops in _SHEETS:
        if re.fullmatch(pattern, name):
            found = teraflops[_FORMATS.index(dtype)]
            return None if found is None else Peak(found * 1e12, dtype, title)
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the device's dense peak by its data sheet; None for CPUs, unlisted devices and unsupported formats.

    float32 counts as TF32 where torch may use it (``torch.set_float32_matmul_precision``).
    """
    if device.type != "cuda":
        return None
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        name = "tf32"
    return sheet_peak(torch.cuda.get_device_name(device), name)


def measured_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> Peak:
    """Measure the best FLOP/s of large square matrix products of several sizes, in about ``seconds`` (> 0).

    The result is the rate of a program with this many threads, which is below the data sheet's peak. The factors are random,
    because a GPU needs less power for constant ones and then clocks higher than in training. The global random state is not
    used.
    """
    sizes = (512, 1024) if device.type == "cpu" else (4096, 8192, 16384)  # the fastest one differs by device
    generator = torch.Generator(device).manual_seed(0)
    best = max(_rate_of_products(device, dtype, size, seconds / len(sizes), generator) for size in sizes)
    return Peak(best, str(dtype).removeprefix("torch."), "measured")


@torch.no_grad()
def _rate_of_products(
    device: torch.device, dtype: torch.dtype, size: int, seconds: float, generator: torch.Generator
) -> float:
    """Return the best FLOP/s of products of two square random matrices."""
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
