"""The report's figures: they fit a phone, and are readable by the colour-blind and without colour."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.drawing import (
    COLOURS,
    GRID,
    INK,
    PAPER,
    Drawing,
    grid_of,
    label,
    one,
    require_extra,
    style,
)
from lightning_eff.bench.reports.pareto import pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
TOGETHER = 6  #: the most arms in one diagram; more are drawn as small multiples
GRID_POINTS = 120

Curve = Sequence[tuple[float, float]]


@dataclass
class _Line:
    """An arm in a diagram: its style and its finished runs."""

    name: str
    colour: str
    dash: Any
    marker: str | None
    runs: list[dict[str, Any]]


def draw(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[Drawing]:
    """Draw all figures for which there are results, in the report's order.

    Args:
        results: results of the bench's schema.
        summary: the summary of the same results.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    require_extra()
    with style():
        lines = _lines(results, summary)
        drawings = [speedups(results, summary)]
        if any(line.runs for line in lines):
            plan = results["plan"]
            clock = "reference-system time" if plan["budget"]["clock"] == "reference" else "wall-clock"
            target, share = plan["target"], _late(plan["budget"]["seconds"])
            drawings.append(_curves("seconds", f"training seconds ({clock})", target, lines, _points("seconds"), share))
            drawings.append(_curves("samples", "samples seen", target, lines, _points("samples"), None))
            drawings.append(_memory(lines))
            drawings.append(phases(results, summary))
            drawings.append(pareto(results, summary))
        return [drawing for drawing in drawings if drawing is not None]


def speedups(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> Drawing | None:
    """Draw a forest plot of each arm's speed-up with its interval."""
    arms = [arm for arm in results["plan"]["arms"] if summary[arm["name"]]["speedup"]]
    arms = [arm for arm in arms if arm["kind"] in ("recipe", "control")]
    if not arms:
        return None
    known = [summary[arm["name"]]["speedup"] for arm in arms]
    left = min(0.85, max(0.25, min(interval["low"] for interval in known))) / 1.06
    right = max(1.18, min(4.0, max(interval["high"] for interval in known))) * 1.06
    wide = math.log(right / left) > math.log(6)
    every = (0.25, 0.5, 1, 2, 4) if wide else (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4)
    ticks = [tick for tick in every if left <= tick <= right]
    figure, axes = one(0.5 + 0.44 * len(arms))
    axes.grid(False)
    for row, (arm, interval) in enumerate(zip(arms, known, strict=True)):
        y, colour = -row, COLOURS[1] if arm["kind"] == "control" else COLOURS[0]
        low, high = max(left, interval["low"]), min(right, interval["high"])
        lines = ([INK if tick == 1 else GRID for tick in ticks], [1.0 if tick == 1 else 0.6 for tick in ticks])
        axes.vlines(ticks, y - 0.2, y + 0.2, colors=lines[0], linewidths=lines[1], zorder=0.5)  # not behind the labels
        axes.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
        for end, bound, marker in ((low, interval["low"], "<"), (high, interval["high"], ">")):
            axes.plot([end], [y], marker=marker if end != bound else "|", color=colour, markersize=6, linestyle="none")
        middle = min(max(interval["estimate"], left), right)
        face = PAPER if arm["kind"] == "control" else colour
        axes.plot([middle], [y], marker="o", color=colour, markerfacecolor=face, markersize=6, linestyle="none")
        text = words.bracket(interval, words.ratios)
        name = label(arm["name"] if arm["kind"] == "recipe" else f"{arm['name']} (control)", 36)
        place: Any = axes.get_yaxis_transform()
        axes.text(0.0, y + 0.27, name, fontsize=9, transform=place, va="bottom", fontweight="bold")
        axes.text(1.0, y + 0.27, text, fontsize=8, transform=place, va="bottom", ha="right")
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(-len(arms) + 0.6, 0.75)
    axes.set_xticks(ticks, minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("speed-up over the baseline (log scale); right of 1 is faster")
    said = "; ".join(f"{a['name']} {words.bracket(i, words.ratios)}" for a, i in zip(arms, known, strict=True))
    caption = (
        "Speed-up over the baseline with its 95 % interval. An arm is faster or slower if this interval excludes 1 and the"
        f" interval of the difference in final {results['plan']['target']} excludes 0."
    )
    if any(summary[arm["name"]]["speedup_from"] == "throughput" for arm in arms):
        caption += " For arms that train bit for bit like the baseline, this interval decides alone."
    return Drawing("speedups", caption, f"Speed-ups with 95 % intervals: {said}.", figure)


def _curves(
    name: str,
    across: str,
    target: str,
    lines: list[_Line],
    curve_of: Callable[[dict[str, Any]], Curve],
    late: Callable[[float], bool] | None,
) -> Drawing:
    """Draw each arm's metric with its range over seeds, in one diagram or in several small ones."""
    figure, grid, multiples = _panelled(lines, curve_of, across, target)
    shown = [line for panel in multiples for line in panel]
    if late is None:
        last = min(curve_of(run)[-1][0] for line in shown for run in line.runs)
        late = _late(last)
    values = [y for line in shown for run in line.runs for x, y in curve_of(run) if late(x)]
    low, high = min(values), max(values)
    grid[0].set_ylim(low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))
    start = " The first fifth of the budget may be cut off."
    caption = f"{target} against {across}: mean and range over seeds. Controls are dashed." + start
    ends = [(line.name, fmean(curve_of(run)[-1][1] for run in line.runs)) for line in lines if line.runs]
    said = "; ".join(f"{who} {words.number(value)}" for who, value in ends)
    return Drawing(name, caption, f"Curves of {target} against {across}. At the end: {said}.", figure)


def _memory(lines: list[_Line]) -> Drawing | None:
    """Draw the memory in use over the budget."""
    kept = [line for line in lines if any(run["memory"] for run in line.runs)]
    if not kept:
        return None
    largest = max(value or 0 for line in kept for run in line.runs for _, value in run["memory"])
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")

    def curve(run: dict[str, Any]) -> Curve:
        return [(seconds, value / unit) for seconds, value in run["memory"] if value is not None]

    figure, _, _ = _panelled(kept, curve, "training seconds", f"memory ({name})")
    kinds = sorted({run["memory_kind"] for line in kept for run in line.runs})
    peaks = [(line.name, fmean(run["peak_memory_bytes"] for run in line.runs)) for line in kept]
    said = "; ".join(f"{who} {words.amount(value)}" for who, value in peaks)
    caption = f"Memory during training ({' and '.join(kinds)}): mean and range over seeds."
    return Drawing("memory", caption, f"Memory over time. Peaks: {said}.", figure)


def phases(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> Drawing | None:
    """Draw the wall-clock time of a run by phase."""
    arms = [
        (arm["name"], words.finished_runs(results, arm["name"], summary[arm["name"]]))
        for arm in results["plan"]["arms"]
    ]
    arms = [(name, runs) for name, runs in arms if runs]
    if not arms:
        return None
    figure, axes = one(0.95 + 0.4 * len(arms))
    axes.grid(False)  # it would cross the labels
    rows = [-row for row in range(len(arms))]
    ends, bars = [0.0] * len(arms), []
    for colour, (_, _, seconds_of) in zip(COLOURS, words.PHASES, strict=True):
        widths = [fmean(map(seconds_of, runs)) for _, runs in arms]
        bars.append(axes.barh(rows, widths, left=ends, height=0.34, color=colour, edgecolor=PAPER, linewidth=0.8)[0])
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    wholes = [f"{words.number(end, 3)} s" for end in ends]
    for row, (name, _), whole, end in zip(rows, arms, wholes, ends, strict=True):
        axes.text(0, row + 0.2, label(name, 40), fontsize=8, va="bottom")
        axes.text(end, row + 0.2, whole, fontsize=8, va="bottom", ha="right")
    axes.set_yticks([])
    axes.set_ylim(-len(arms) + 0.7, 0.7)
    axes.set_xlabel("wall-clock seconds per run, mean over seeds")
    figure.legend(bars, [head for _, head, _ in words.PHASES], loc="outside lower center", ncols=3)
    said = "; ".join(f"{name} {whole}" for (name, _), whole in zip(arms, wholes, strict=True))
    caption = "Wall-clock time of a run by phase. Set-up, compilation and validation do not count against the budget."
    return Drawing("phases", caption, f"Wall-clock seconds per run, all phases: {said}.", figure)


def band(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return the mean, minimum and maximum of several curves over their common range, interpolated linearly.

    Args:
        curves: sequences of at least one (x, y), with rising x.

    Returns:
        The x values of all curves, thinned to about 120, then the mean, minimum and maximum of y at each.
    """
    import numpy as np

    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    xs = sorted({x for curve in curves for x, _ in curve if start <= x <= end} | {min(start, end), end})
    stride = math.ceil(len(xs) / GRID_POINTS)
    xs = xs[(len(xs) - 1) % stride :: stride]
    lines = [np.interp(xs, [x for x, _ in curve], [y for _, y in curve]) for curve in curves]
    columns = np.transpose(lines).tolist()
    return xs, [fmean(column) for column in columns], [min(c) for c in columns], [max(c) for c in columns]


def _points(field: str) -> Callable[[dict[str, Any]], Curve]:
    """Return a function from a run to its (field, metric) pairs with a finite metric."""

    def curve(run: dict[str, Any]) -> Curve:
        good = [p for p in run["points"] if p["metric"] is not None and math.isfinite(p["metric"])]
        return [(p[field], p["metric"]) for p in good]

    return curve


def _late(budget: float) -> Callable[[float], bool]:
    return lambda x: x >= 0.2 * budget


def _lines(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[_Line]:
    """Return the arms without the ladder: the baseline black, each recipe in a colour, its controls dashed in that colour."""
    arms = {arm["name"]: arm for arm in results["plan"]["arms"] if arm["kind"] != "ladder"}
    first, recipes = next(iter(arms)), [name for name, arm in arms.items() if arm["kind"] == "recipe"]

    def line(name: str, colour: str, dash: Any, marker: str | None) -> _Line:
        return _Line(name, colour, dash, marker, words.finished_runs(results, name, summary[name]))

    lines = [line(first, INK, "solid", None)]
    for index, recipe in enumerate(recipes):
        colour = COLOURS[index % len(COLOURS)]
        lines.append(line(recipe, colour, "solid", MARKERS[index % len(MARKERS)]))
        controls = [name for name, arm in arms.items() if arm["kind"] == "control" and arm["of"] == recipe]
        lines += [line(name, colour, DASHES[at % len(DASHES)], None) for at, name in enumerate(controls)]
    return lines


def _panels(lines: list[_Line]) -> list[list[_Line]]:
    """Return all lines as one panel, or for many arms one panel per recipe: baseline, recipe and controls."""
    kept = [line for line in lines if line.runs]
    if len(kept) <= TOGETHER or lines[0] not in kept:
        return [kept]
    panels: list[list[_Line]] = []
    for line in kept[1:]:
        if line.dash == "solid" or not panels or panels[-1][1].colour != line.colour:
            panels.append([kept[0]])
        panels[-1].append(line)
    return panels


def _bands(axes: "Axes", lines: list[_Line], curve_of: Callable[[dict[str, Any]], Curve]) -> None:
    for line in lines:
        curves = [curve for curve in map(curve_of, line.runs) if curve]
        if not curves:
            continue
        xs, mean, low, high = band(curves)
        every = max(1, len(xs) // 6)
        axes.fill_between(xs, low, high, color=line.colour, alpha=0.18, linewidth=0)
        axes.plot(
            xs,
            mean,
            color=line.colour,
            linestyle=line.dash,
            linewidth=1.8 if line.colour == INK else 1.4,
            marker=line.marker,
            markersize=4,
            markevery=(every // 2, every),
            label=label(line.name, 40),
        )


def _panelled(
    lines: list[_Line], curve_of: Callable[[dict[str, Any]], Curve], across: str, up: str
) -> "tuple[Figure, list[Axes], list[list[_Line]]]":
    """Return a figure of all lines' bands with labels, its diagrams, and the lines of each.

    The legend names every line. For small multiples it names the kinds of lines, in the cell that is left free if there is one.
    """
    panels = _panels(lines)
    figure, grid = grid_of(len(panels))
    for axes, panel in zip(grid, panels, strict=False):
        _bands(axes, panel, curve_of)
        if len(panels) > 1:
            axes.set_title(label(panel[1].name, 26), fontsize=8, loc="left")
    figure.supxlabel(across, fontsize=9)
    figure.supylabel(label(up, 40), fontsize=9)
    handles, names = grid[panels.index(max(panels, key=len))].get_legend_handles_labels()
    if len(panels) == 1:
        figure.legend(handles, names, loc="outside upper center", ncols=1 if max(map(len, names)) > 24 else 2)
    else:
        kinds = ["baseline", "recipe", "its control", "second control", "third control"][: len(handles)]
        free = figure.axes[len(panels) :]
        if free:
            free[0].legend(handles[: len(kinds)], kinds, loc="center")
        else:
            figure.legend(handles[: len(kinds)], kinds, loc="outside upper center", ncols=3)
    return figure, grid, panels
