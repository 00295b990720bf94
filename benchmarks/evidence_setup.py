"""Compiling counted: what a bench's figures come to where the seconds of compiling are the run's own."""

from statistics import fmean
from typing import Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.statistics import summarize

COMPILES = "class_path: RegionalCompilation"  #: in a config


def arms_that_compile(results: dict[str, Any]) -> list[str]:
    """The arms of which a config names :class:`RegionalCompilation`."""
    return [arm["name"] for arm in results["plan"]["arms"] if any(COMPILES in text for text in arm["configs"])]


def included(results: dict[str, Any], seconds: float | None = None) -> dict[str, dict[str, Any]]:
    """A bench's summary with compiling counted: all that a curve reaches, it reaches so much later.

    Args:
        results: of a bench.
        seconds: that compiling takes in the arms that compile; None for what it took in each run. The other arms' runs have
            their own in any case.
    """
    compiled = arms_that_compile(results)
    took = {
        id(run): run["warmup_seconds"] if seconds is None or run["arm"] not in compiled else seconds
        for run in results["runs"]
    }
    return summarize({**results, "runs": [_later(run, took[id(run)]) for run in results["runs"]]})


def _later(run: dict[str, Any], seconds: float) -> dict[str, Any]:
    points = [{**point, "seconds": point["seconds"] + seconds} for point in run["points"]]
    return {**run, "seconds": run["seconds"] + seconds, "points": points}


def lines(results: dict[str, Any], measured: dict[str, Any] | None) -> list[str]:
    """What there is to say of the arms that compile, and their table; nothing where none does.

    Args:
        results: of a bench, with their summary.
        measured: what ``benchmarks/compile_time.py`` wrote of the same task; None for none.
    """
    arms = arms_that_compile(results)
    if not arms:
        return []
    told = "The figures above leave compilation out. Counted as training time, it delays everything that a run reaches."
    counted: dict[str, dict[str, dict[str, Any]]] = {"apart": results["summary"], "as it was": included(results)}
    if measured is None:
        told += " Compilation from an empty cache was not measured."
    else:
        empty, filled = (measured["median"][state]["processor_seconds"] for state in ("empty", "filled"))
        device = measured["machine"]
        told += (
            f" From an empty cache it takes {empty:.1f} s of processor time, from a filled one {filled:.1f} s"
            f" (`benchmarks/compile_time.py`, torch {device['torch']}, medians of {len(measured['runs']['empty'])} processes)."
        )
        counted["from an empty cache"] = included(results, empty)
    rows = [row for arm in arms for row in _rows(results, arm, counted, measured)]
    return [told, "", "| recipe | compilation | speed-up [95 %] | time to target |", "|---|---|---|---|", *rows]


def _rows(
    results: dict[str, Any],
    arm: str,
    counted: dict[str, dict[str, dict[str, Any]]],
    measured: dict[str, Any] | None,
) -> list[str]:
    took = fmean(run["warmup_seconds"] for run in results["runs"] if run["arm"] == arm)
    names = {"apart": "left out", "as it was": f"as in these runs, {took:.1f} s"}
    if measured is not None:
        names["from an empty cache"] = f"from an empty cache, {measured['median']['empty']['processor_seconds']:.1f} s"
    rows = []
    for how, summary in counted.items():
        _, cells = words.cells(results, summary)
        (row,) = (row for row in cells if row["arm"] == arm)
        rows.append(f"| {arm} | {names[how]} | {row['speedup']} | {row['time']} |")
    return rows
