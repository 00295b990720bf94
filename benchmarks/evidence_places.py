"""Which of the kept runs were made on another processor than the rest of their bench."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines(folder: Path) -> list[str]:
    """A table with a line for each file of results that has runs from elsewhere; nothing where none has.

    Args:
        folder: with results as JSON, as ``benchmarks/evidence.py`` keeps them.
    """
    rows = [row for file in sorted(folder.glob("*.json")) for row in _rows(file.stem, json.loads(file.read_text()))]
    if not rows:
        return []
    return [
        "Some further seeds ran on another processor, which rounds differently. Their time is counted with the step costs"
        " of the first processor.",
        "",
        "| results | first processor | other processor | its seeds | arms | runs |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _rows(name: str, results: dict[str, Any]) -> Iterator[str]:
    runs = results.get("runs") if isinstance(results, dict) else None
    moved = [run for run in runs if run.get("cpu")] if isinstance(runs, list) and "plan" in results else []
    for cpu in sorted({run["cpu"] for run in moved}):
        there = [run for run in moved if run["cpu"] == cpu]
        seeds = ", ".join(map(str, sorted({run["seed"] for run in there})))
        arms = len({run["arm"] for run in there})
        yield f"| `{name}` | {results['machine']['cpu']} | {cpu} | {seeds} | {arms} | {len(there)} of {len(runs or ())} |"
