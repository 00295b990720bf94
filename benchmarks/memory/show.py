"""What is kept of a benchmark: the machine, tables of text, and a picture."""

import os
import platform
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_eff.monitor.machine import driver

INK, COLOURS = "#1b1f24", ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")  # Okabe and Ito 2008


def fingerprint() -> dict[str, Any]:
    """The machine and the versions, without names or paths."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "clock": "processor time" if not torch.cuda.is_available() and torch.get_num_threads() == 1 else "wall",
    }
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ModuleNotFoundError:
        pass
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        found["driver"] = driver()
    return found


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def middle(values: dict[str, float] | None, digits: int = 3) -> str:
    """Median and, in brackets, least and most; a dash for None."""
    if values is None:
        return "-"
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} - {values['max']:.{digits}f})"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A markdown table, its columns aligned."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [headings, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def mib(nbytes: float | None) -> str:
    return "-" if not nbytes else f"{nbytes / 2**20:.1f}"


def of_kernels(rows: list[dict[str, Any]]) -> str:
    """GB/s of each kernel."""
    cells = [
        [
            row["kernel"],
            row["error"][:60] if "error" in row else middle(row["gb_per_second"], 1),
            middle(row.get("of_copy"), 2),
        ]
        for row in rows
    ]
    return table(["kernel", "GB/s", "of a copy's"], cells)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over plain against memory over plain, a panel for each model and batch.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    good = [row for row in rows if "ratio" in row and row.get("plain_beyond_bytes")]
    panels = list(dict.fromkeys((row["model"], row["batch_size"]) for row in good))
    if not panels:
        return
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for row in good:
            if (row["model"], row["batch_size"]) != panel:
                continue
            families = ("plain", "optimal offload", "optimal", "compile", "compress", "")
            family = next(i for i, name in enumerate(families) if row["arm"].startswith(name))
            x, y = row["beyond_bytes"] / row["plain_beyond_bytes"], row["ratio"]
            bars = [[y["median"] - y["min"]], [y["max"] - y["median"]]]
            axes.errorbar([x], [y["median"]], bars, fmt="o", color=COLOURS[family], markersize=5, linewidth=1)
            axes.annotate(
                row["arm"], (x, y["median"]), xytext=(4, 3), textcoords="offset points", fontsize=7, color=INK
            )
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel("memory of a step over plain's")
        axes.set_ylabel("time of a step over plain's: median, least, most")
        axes.set_title(f"{panel[0]}, batch {panel[1]}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#d5d9de", linewidth=0.6)
    figure.savefig(path, dpi=130)
