"""The trade of quality, time and memory: which arms are not beaten in all three."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.drawing import COLOURS, INK, PAPER, WIDTH, Drawing, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def trades(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each arm's final metric, seconds and peak memory, and whether it is on the front.

    Seconds are those to the baseline's final metric, or the whole budget where that is not reached; ladder arms, which are
    the baseline at other budgets, have theirs. An arm is on the front unless another is as good in all three and better in
    one.

    Returns:
        A dict for each arm that finished: ``arm``, ``kind``, ``metric``, ``seconds``, ``reached``, ``bytes``, ``front``.
    """
    plan = results["plan"]
    sign = 1 if plan["mode"] == "min" else -1
    found = []
    for arm in plan["arms"]:
        own = summary[arm["name"]]
        runs = words.finished_runs(results, arm["name"], own)
        if not runs:
            continue
        reached = [seconds for seconds in own["time_to_target"]["seconds"] if seconds is not None]
        whole = arm["factor"] * plan["budget"]["seconds"]
        there = arm["kind"] != "ladder" and len(reached) == len(runs)
        found.append(
            {
                "arm": arm["name"],
                "kind": arm["kind"],
                "metric": own["final"]["mean"],
                "seconds": fmean(reached) if there else whole,
                "reached": there,
                "bytes": fmean(run["peak_memory_bytes"] for run in runs),
            }
        )
    costs = [(sign * one["metric"], one["seconds"], one["bytes"]) for one in found]
    return [
        {**one, "front": not any(_beats(other, own) for other in costs)} for one, own in zip(found, costs, strict=True)
    ]


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def pareto(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> Drawing | None:
    """Final metric against seconds, and against memory; what is on the front is filled and named."""
    from matplotlib.figure import Figure

    found = trades(results, summary)
    if len(found) < 2:
        return None
    largest = max(one["bytes"] for one in found)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(WIDTH, 5.2 + 0.17 * len(found)), layout="constrained")
    target = results["plan"]["target"]
    for axes, of, across in (
        (figure.add_subplot(2, 1, 1), lambda one: one["seconds"], "seconds to the baseline's metric, or the budget"),
        (figure.add_subplot(2, 1, 2), lambda one: one["bytes"] / unit, f"peak memory ({name})"),
    ):
        _points(axes, [(of(one), one["metric"], one) for one in found])
        axes.set_xlabel(across)
        axes.set_ylabel(label(target, 30))
        axes.margins(0.12, 0.14)
    handles = list(figure.axes[0].lines)
    names = [f"{number} {label(one['arm'], 50)}" for number, one in enumerate(found, 1)]
    figure.legend(handles, names, loc="outside lower center")
    told = "; ".join(
        f"{one['arm']} {words.number(one['metric'])}, {words.number(one['seconds'], 3)} s, {words.amount(one['bytes'])}"
        f"{' (on the front)' if one['front'] else ''}"
        for one in found
    )
    caption = (
        f"{target}, time and memory, means over seeds. Filled and numbered in bold: no other arm is as good in all three."
        " Square: the baseline, diamonds: it at other budgets; triangles: controls; circles: recipes."
    )
    return Drawing("pareto", caption, f"Final metric, seconds and memory of each arm: {told}.", figure)


def _points(axes: "Axes", points: Sequence[tuple[float, float, dict[str, Any]]]) -> None:
    shapes = {"baseline": "s", "ladder": "D", "recipe": "o", "control": "^"}
    colours = {"baseline": INK, "ladder": INK, "recipe": COLOURS[0], "control": COLOURS[1]}
    for number, (x, y, one) in enumerate(points, 1):
        colour = colours[one["kind"]]
        face = colour if one["front"] else PAPER
        axes.plot([x], [y], shapes[one["kind"]], color=colour, markerfacecolor=face, markersize=6, linestyle="none")
        axes.annotate(
            str(number),
            (x, y),
            xytext=(5, 4 if number % 2 else -11),
            textcoords="offset points",
            fontsize=8,
            fontweight="bold" if one["front"] else "normal",
        )
