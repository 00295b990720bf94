"""The units and how they went, as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import files
from benchmarks.gpu.driver import Unit, status_of


def summary(units: Sequence[Unit], folders: Sequence[Path], environment: dict[str, Any]) -> str:
    """A line for each unit: its status, seconds, rows and error."""
    rows = [["unit", "status", "seconds", "rows", "failed", "skipped", ""]]
    for unit in units:
        status = status_of(unit, folders, environment)
        if status == "new":
            rows.append([unit.name, "-", "-", "-", "-", "-", ""])
            continue
        result = next(
            found
            for folder in folders
            if files.counts(found := files.read(files.file_of(folder, unit.name)), environment, unit.settings) and found
        )
        of = result["rows"]
        numbers = [len(of), sum("error" in row for row in of), sum("skipped" in row for row in of)]
        error = (result.get("error") or "")[:70]
        rows.append([unit.name, status, f"{result['seconds']:.0f}", *map(str, numbers), error])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
