"""Which of the kept runs were made on another processor than the rest of their bench, and the step costs they count in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_eff.bench.arms import Arm
from lightning_eff.bench.references import SCHEMA, task
from lightning_eff.bench.results import now
from lightning_eff.monitor.machine import SAME_MACHINE, fingerprint


def unit(results: Path, baseline: Path, file: Path) -> Path:
    """Write a file of step costs for this processor that has those of a baseline on another one, and return its path.

    A bench with it counts in seconds of the other processor. It measures how much a step of an arm costs beside the
    baseline's here.

    Args:
        results: of a bench of this baseline, on one thread.
        baseline: its config.
        file: the path to write to.
    """
    kept = json.loads(results.read_text())
    first = kept["plan"]["arms"][0]["name"]
    arm = Arm("baseline", "baseline", (str(baseline),))
    machine = fingerprint(kept["plan"]["threads"])
    entry = {
        "task": task(arm),
        "machine": {name: machine[name] for name in SAME_MACHINE},
        "name": arm.name,
        "created": now(),
    }
    entry |= {"torch": machine["torch"], "prices": kept["calibration"][first]["prices"]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"schema": SCHEMA, "entries": [entry]}, indent=1) + "\n")
    return file


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
        " of the first processor. Arms that ran on the other processor alone have their step costs, relative to the baseline's,"
        " from there.",
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
