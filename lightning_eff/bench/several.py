"""A bench at several budgets: one after the other, at the same prices, and what they found side by side."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.bench.pace import Budget
from lightning_eff.bench.reports import overview
from lightning_eff.bench.reports.drawing import png
from lightning_eff.bench.results import FILE_NAME, load

PRICES = "prices.json"  #: in the bench's folder, where no other reference is named


def name(budget: Budget) -> str:
    """A budget as a word and as a folder: "20s", "60rs"."""
    return f"{budget.seconds:g}{'rs' if budget.clock == 'reference' else 's'}"


def parse(given: "str | float | Budget | Sequence[str | float | Budget]") -> list[Budget]:
    """Budgets from one, from several, or from a text with commas between them, in order of their length.

    Raises:
        ValueError: if there is none, one twice, or some of one clock and some of the other.
    """
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
    budgets = sorted((Budget.parse(part) for part in parts), key=lambda budget: budget.seconds)
    if not budgets or len(set(budgets)) < len(budgets) or len({budget.clock for budget in budgets}) > 1:
        raise ValueError(f"Got budgets {given!r}; expected one, or several different ones of one clock: '20rs,60rs'.")
    return budgets


def run(
    make: Callable[[Budget, Path, Path | None], Any],
    budgets: Sequence[Budget],
    out: Path,
    *,
    progress: bool,
    report: bool,
) -> dict[str, dict[str, Any]]:
    """The results of a bench at each budget, by its name; each in a folder of its own in ``out``, with a page over all.

    Args:
        make: the bench of a budget, in a folder, with a reference for prices if none was named.
        budgets: the shortest first.
        out: the folder.
        progress: see :meth:`Benchmark.run`.
        report: likewise.
    """
    prices = out / PRICES if budgets[0].clock == "reference" else None
    every = {name(b): make(b, out / name(b), prices).run(progress=progress, report=report) for b in budgets}
    if report:
        draw(every, out)
    return every


def draw(every: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Write ``report.html`` and the figure over all budgets."""
    drawing = overview.drawn(every)
    (out / "report.html").write_text(overview.page(every, drawing), encoding="utf-8")
    if drawing is not None:
        (out / "budgets.png").write_bytes(png(drawing))


def found(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The results of every budget in a folder; empty where it is not one of several budgets."""
    place = Path(folder)
    if not place.is_dir() or (place / FILE_NAME).is_file():
        return {}
    results = [load(file) for file in place.glob(f"*/{FILE_NAME}")]
    budgets = [(Budget(r["plan"]["budget"]["seconds"], r["plan"]["budget"]["clock"]), r) for r in results]
    return {name(b): r for b, r in sorted(budgets, key=lambda pair: pair[0].seconds)}
