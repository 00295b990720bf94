"""Where a step's time and memory go, before and after."""

import math
from collections.abc import Mapping, Sequence

from lightning_eff.advice.engine import Findings
from lightning_eff.advice.looking import View
from lightning_eff.advice.reports.table import ordered
from lightning_eff.bench.reports.drawing import COLOURS, INK, PAPER, Drawing, label, one, style

PHASES = ("data", "forward", "backward", "optimizer", "extra", "other")
KINDS = ("parameters", "gradients", "optimizer", "activations")
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _stacks(found: Findings) -> list[tuple[str, View, float]]:
    """The run as it is and each recipe: its name, its profile, and how many times as fast it is."""
    after = [
        (name, stack.view, stack.speed.estimate)
        for name, stack in (("recipe", found.stack), ("lower precision", found.lower))
        if stack.gains and stack.view is not None and stack.speed is not None
    ]
    return [("now", found.view, 1.0), *after]


def time(found: Findings) -> Drawing:
    """A bar of phases for the run as it is, and for the recipe. Its length follows from the measured speed-up."""
    whole = 1000 * math.fsum(found.view.phases.values())
    rows = [(name, _of(view.phases, whole / speed)) for name, view, speed in _stacks(found)]
    return _bars("time", rows, PHASES, "milliseconds per batch", "Where the time of a batch goes")


def memory(found: Findings) -> Drawing:
    """A bar of kinds of memory for the run as it is, and for the recipe."""
    pairs = [
        (name, stack.memory)
        for name, stack in (("recipe", found.stack), ("lower precision", found.lower))
        if stack.gains and stack.memory is not None
    ]
    held = [("now", pairs[0][1][0] if pairs else found.view.memory), *((name, after) for name, (_, after) in pairs)]
    largest = max(sum(kinds.values()) for _, kinds in held) or 1
    size, unit = next(((size, unit) for size, unit in _UNITS if largest >= size), (1, "bytes"))
    rows = [(name, {k: b / size for k, b in kinds.items()}) for name, kinds in held]
    return _bars("memory", rows, KINDS, f"{unit} of tensors", "Where memory goes")


def _of(phases: Mapping[str, float], whole: float) -> dict[str, float]:
    """Phases scaled to a sum, since the machine's speed may differ between two profiles."""
    total = math.fsum(phases.values()) or 1.0
    return {name: whole * seconds / total for name, seconds in phases.items()}


def _bars(
    name: str, rows: Sequence[tuple[str, Mapping[str, float]]], parts: tuple[str, ...], unit: str, head: str
) -> Drawing:
    shown = [part for part in parts if any(row.get(part) for _, row in rows)]
    with style():
        figure, axes = one(1.1 + 0.4 * len(rows))
        ends = [0.0] * len(rows)
        bars = []
        for index, part in enumerate(shown):
            widths = [row.get(part, 0.0) for _, row in rows]
            places = [-i for i in range(len(rows))]
            colour = COLOURS[index % len(COLOURS)]
            bars.append(
                axes.barh(places, widths, left=ends, height=0.6, color=colour, edgecolor=PAPER, linewidth=0.8)[0]
            )
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.set_yticks([-i for i in range(len(rows))], [row for row, _ in rows])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        figure.legend(bars, shown, loc="outside upper center", ncols=min(len(shown), 3) or 1)
    told = "; ".join(
        f"{row}: " + ", ".join(f"{part} {values.get(part, 0.0):.3g}" for part in shown) for row, values in rows
    )
    return Drawing(name, f"{head}, in {unit}.", f"{head}, in {unit}: {told}.", figure)


def speeds(found: Findings) -> Drawing | None:
    """The speed-up of every trial, with its interval."""
    rows = ordered(found)
    if not rows:
        return None
    with style():
        figure, axes = one(0.7 + 0.26 * len(rows))
        for place, outcome in enumerate(rows):
            assert outcome.speed is not None
            colour = COLOURS[0] if outcome.faster else COLOURS[1] if outcome.slower else INK
            low, high = math.log2(max(outcome.speed.low, 2**-4)), math.log2(min(outcome.speed.high, 2**6))
            axes.plot([low, high], [-place, -place], color=colour, linewidth=2)
            axes.plot([math.log2(outcome.speed.estimate)], [-place], "o", color=colour, markersize=4)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks([-place for place in range(len(rows))], [label(o.trial.name, 28) for o in rows])
        axes.grid(visible=False, axis="y")
        ticks = [t for t in (-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4) if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{2**t:.2g}" for t in ticks])
        axes.set_ylim(-len(rows) + 0.5, 0.5)
        axes.set_xlabel("times as fast as now")
    told = "; ".join(f"{o.trial.name} {o.speed.estimate:.2f}" for o in rows if o.speed is not None)
    caption = "Speed-up of each trial with its 95 % interval. Right of 1 it is faster."
    return Drawing("speeds", caption, f"Speed-ups: {told}.", figure)
