"""What the device gives at most: matrix products in each format and size, copies in its memory, copies from and to the host.

All numbers are random: on zeros or ones a GPU needs less power, clocks higher, and shows rates that training never sees.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import device, rates, spread
from benchmarks.gpu.work import Row, Skip, Work
from lightning_eff.monitor.peaks import sheet_peak

FORMATS = ("float32", "tf32", "bfloat16", "float16", "float8", "int8")
_scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] -- as in lightning_eff.precision


def run(work: Work) -> None:
    sizes = (32, 64) if work.tiny else (2048, 4096, 8192, 16384)
    for name in FORMATS:
        for size in sizes:
            work.row(f"product {name} {size}", lambda name=name, size=size: product(name, size, work.tiny), needs=3)
    for megabytes in (1,) if work.tiny else (64, 512, 2048):
        for kind in ("copy", "read", "write"):
            work.row(f"{kind} {megabytes} MB", lambda kind=kind, m=megabytes: in_memory(kind, m, work.tiny), needs=2)
    for kind in ("pageable", "pinned"):
        for to in ("device", "host"):
            work.row(f"{kind} to {to}", lambda kind=kind, to=to: across(kind, to, work.tiny), needs=3)


def product(name: str, size: int, tiny: bool) -> Row:
    """TFLOP/s of a product of two square matrices, and of the data sheet's peak where there is one."""
    where = device(tiny)
    g = torch.Generator(where).manual_seed(0)
    a, b = (torch.randn(size, size, device=where, generator=g) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        found = rates(multiply(name, a, b), 2 * size**3 / 1e12, where, tiny=tiny)
    finally:
        torch.set_float32_matmul_precision(before)
    row: Row = {"format": name, "size": size, "tflops": spread(found)}
    peak = None if tiny else sheet_peak(torch.cuda.get_device_name(), name)
    return row | ({} if peak is None else {"of_sheet": max(found) * 1e12 / peak.flops, "sheet": peak.source})


def multiply(name: str, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """A program that multiplies two float32 matrices in a format, its conversions done."""
    if name == "int8":
        x, y = ((t * 40).clamp(-127, 127).to(torch.int8) for t in (a, b))
        columns = y.t().contiguous().t()
        return lambda: torch._int_mm(x, columns)  # pyright: ignore[reportPrivateImportUsage]
    if name == "float8":
        if a.is_cuda and torch.cuda.get_device_capability() < (8, 9):
            raise Skip("float8 products need compute capability 8.9 or later")
        x, y, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=a.device)
        columns = y.t().contiguous().t()
        return lambda: _scaled_mm(x, columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)
    x, y = a.to(dtype), b.to(dtype)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, y, out=out)


def in_memory(kind: str, megabytes: int, tiny: bool) -> Row:
    """GB/s, of bytes read and bytes written."""
    where = device(tiny)
    source = torch.randn(megabytes * 250_000, device=where)
    target, total = torch.empty_like(source), torch.empty((), device=where)
    runs: dict[str, tuple[float, Callable[[], Any]]] = {
        "copy": (2 * source.nbytes, lambda: target.copy_(source)),
        "read": (source.nbytes, lambda: torch.sum(source, (0,), out=total)),
        "write": (source.nbytes, lambda: target.fill_(1.5)),
    }
    nbytes, program = runs[kind]
    return {"kind": kind, "gigabytes_per_second": spread(rates(program, nbytes / 1e9, where, tiny=tiny))}


def across(kind: str, to: str, tiny: bool) -> Row:
    """GB/s between the host's memory and the device's."""
    where = device(tiny)
    host = torch.randn(2**12 if tiny else 2**26)
    if kind == "pinned" and not tiny:
        host = host.pin_memory()
    there = host.to(where, copy=True)
    source, target = (host, there) if to == "device" else (there, host)
    found = rates(lambda: target.copy_(source, non_blocking=True), source.nbytes / 1e9, where, tiny=tiny)
    return {"gigabytes_per_second": spread(found)}
