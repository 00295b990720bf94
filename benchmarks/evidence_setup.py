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
    told = (
        "Compiling is set-up, which all figures above leave out, as they do the baseline's. Counted, what an arm's curve"
        " reaches it reaches so many seconds later. These runs found most of the code on disk, from the bench's rehearsals"
    )
    counted: dict[str, dict[str, dict[str, Any]]] = {"apart": results["summary"], "as it was": included(results)}
    if measured is None:
        told += "; what compiling takes from an empty cache was not measured."
    else:
        empty, filled = (measured["median"][state]["processor_seconds"] for state in ("empty", "filled"))
        device = measured["machine"]
        told += (
            f"; `benchmarks/compile_time.py` begins with an empty cache and comes to {empty:.1f} s of processor time"
            f" (with a filled one {filled:.1f} s; torch {device['torch']}, medians of {len(measured['runs']['empty'])}"
            f" processes), for the code of {measured['recipe']}, which is that of the other arms' blocks too."
        )
        counted["from an empty cache"] = included(results, empty)
    rows = [row for arm in arms for row in _rows(results, arm, counted, measured)]
    return [told, "", "| arm | compiling | speed-up [95 %] | time to target |", "|---|---|---|---|", *rows]


def _rows(
    results: dict[str, Any],
    arm: str,
    counted: dict[str, dict[str, dict[str, Any]]],
    measured: dict[str, Any] | None,
) -> list[str]:
    took = fmean(run["warmup_seconds"] for run in results["runs"] if run["arm"] == arm)
    names = {"apart": "apart", "as it was": f"counted as it was, {took:.1f} s"}
    if measured is not None:
        names["from an empty cache"] = (
            f"counted, {measured['median']['empty']['processor_seconds']:.1f} s from an empty cache"
        )
    rows = []
    for how, summary in counted.items():
        _, cells = words.cells(results, summary)
        (row,) = (row for row in cells if row["arm"] == arm)
        rows.append(f"| {arm} | {names[how]} | {row['speedup']} | {row['time']} |")
    return rows
