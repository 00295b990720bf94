"""The trade-off between quality, time and memory: the arms that no other arm beats in all three."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.drawing import COLOURS, INK, PAPER, WIDTH, Drawing, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

APART = 9.0  #: the least distance of a number from marks and other numbers, in points
_AROUND = (1, 7, 3, 5, 0, 4, 2, 6)  # directions in eighths of a turn, the best place for a number first


def trades(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each arm's final metric, seconds and peak memory, and whether it is on the Pareto front.

    Seconds are the time to the baseline's final metric, or the whole budget if it is not reached. Ladder arms have their own
    budget. An arm is on the front unless another one is at least as good in all three and better in one.

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
    """Draw the final metric against seconds and against memory; arms on the front are filled."""
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
        axes.margins(0.12, 0.14)
        _points(axes, [(of(one), one["metric"], one) for one in found])
        axes.set_xlabel(across)
        axes.set_ylabel(label(target, 30))
    handles = list(figure.axes[0].lines)
    names = [f"{number} {label(one['arm'], 50)}" for number, one in enumerate(found, 1)]
    figure.legend(handles, names, loc="outside lower center", ncols=2 if max(map(len, names)) < 25 else 1)
    said = "; ".join(
        f"{one['arm']} {words.number(one['metric'])}, {words.number(one['seconds'], 3)} s, {words.amount(one['bytes'])}"
        f"{' (on the front)' if one['front'] else ''}"
        for one in found
    )
    caption = (
        f"{target}, time and memory, means over seeds. Filled marks with bold numbers: no other arm is as good in all three."
        " The square is the baseline, diamonds are the baseline at other budgets, triangles are controls, circles are recipes."
    )
    return Drawing("pareto", caption, f"Final metric, seconds and memory of each arm: {said}.", figure)


def _points(axes: "Axes", points: Sequence[tuple[float, float, dict[str, Any]]]) -> None:
    shapes = {"baseline": "s", "ladder": "D", "recipe": "o", "control": "^"}
    colours = {"baseline": INK, "ladder": INK, "recipe": COLOURS[0], "control": COLOURS[1]}
    for x, y, one in points:
        colour = colours[one["kind"]]
        face = colour if one["front"] else PAPER
        axes.plot([x], [y], shapes[one["kind"]], color=colour, markerfacecolor=face, markersize=6, linestyle="none")
    scale, corner = axes.transLimits, (WIDTH * 72 * 0.85, 150.0)  # about the diagram's size in points
    axes.autoscale_view()
    spots = [(x * corner[0], y * corner[1]) for x, y in scale.transform([(x, y) for x, y, _ in points])]
    for number, ((x, y, one), offset) in enumerate(zip(points, offsets(spots), strict=True), 1):
        axes.annotate(
            str(number),
            (x, y),
            xytext=offset,
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="center",
            fontweight="bold" if one["front"] else "normal",
        )


def offsets(spots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return where to put each mark's number, relative to the mark, so that it covers no mark and no other number.

    Args:
        spots: the positions of the marks, in points.
    """
    taken = list(spots)
    found: list[tuple[float, float]] = []
    for x, y in spots:
        tried = [(r * math.cos(a * math.pi / 4), r * math.sin(a * math.pi / 4)) for r in (11, 20, 30) for a in _AROUND]
        free = [one for one in tried if all(math.dist((x + one[0], y + one[1]), other) >= APART for other in taken)]
        found.append((free or tried)[0])
        taken.append((x + found[-1][0], y + found[-1][1]))
    return found
