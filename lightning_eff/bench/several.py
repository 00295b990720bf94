"""Run a bench at several budgets with the same step costs, and compare the results."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.bench.pace import Budget
from lightning_eff.bench.reports import overview
from lightning_eff.bench.reports.drawing import png
from lightning_eff.bench.results import FILE_NAME, load

PRICES = "prices.json"  #: the file of step costs in the bench's folder if there is no other reference


def name(budget: Budget) -> str:
    """Return a budget's name, which is also its folder: "20s", "60rs"."""
    return f"{budget.seconds:g}{'rs' if budget.clock == 'reference' else 's'}"


def parse(given: "str | float | Budget | Sequence[str | float | Budget]") -> list[Budget]:
    """Return the budgets of one value, a list or a text with commas, sorted by length.

    Raises:
        ValueError: if there is none, one occurs twice, or the clocks differ.
    """
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
    budgets = sorted((Budget.parse(part) for part in parts), key=lambda budget: budget.seconds)
    if not budgets or len(set(budgets)) < len(budgets) or len({budget.clock for budget in budgets}) > 1:
        raise ValueError(
            f"Got budgets {given!r}; expected one, or several different ones with the same clock: '20rs,60rs'."
        )
    return budgets


def run(
    make: Callable[[Budget, Path, Path | None], Any],
    budgets: Sequence[Budget],
    out: Path,
    *,
    progress: bool,
    report: bool,
) -> dict[str, dict[str, Any]]:
    """Run a bench at each budget in its own folder, write a page over all, and return the results by the budget's name.

    Args:
        make: a function from a budget, a folder and a file of step costs to a bench.
        budgets: the budgets, the shortest first.
        out: the folder.
        progress: see :meth:`Benchmark.run`.
        report: see :meth:`Benchmark.run`.
    """
    prices = out / PRICES if budgets[0].clock == "reference" else None
    every = {name(b): make(b, out / name(b), prices).run(progress=progress, report=report) for b in budgets}
    if report:
        draw(every, out)
    return every


def draw(every: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Write ``report.html`` and the figure of all budgets."""
    drawing = overview.drawn(every)
    (out / "report.html").write_text(overview.page(every, drawing), encoding="utf-8")
    if drawing is not None:
        (out / "budgets.png").write_bytes(png(drawing))


def found(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Return the results of every budget in a folder, or an empty dict if it is the folder of a single bench."""
    place = Path(folder)
    if not place.is_dir() or (place / FILE_NAME).is_file():
        return {}
    results = [load(file) for file in place.glob(f"*/{FILE_NAME}")]
    budgets = [(Budget(r["plan"]["budget"]["seconds"], r["plan"]["budget"]["clock"]), r) for r in results]
    return {name(b): r for b, r in sorted(budgets, key=lambda pair: pair[0].seconds)}
