"""Present a plan as text and as a picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_eff._core._lightning.extras import missing
from lightning_eff.memory._planning.chain import Action, Event, Item, Keep, Segment, Stage, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#1b1f24", "#d5d9de"
COLOURS = {Action.KEEP: "#0072b2", Action.RECOMPUTE: "#e69f00", Action.OFFLOAD: "#009e73"}  # Okabe and Ito 2008
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
HEADINGS = ("blocks", "what happens", "forward runs", "forward ms", "backward ms", "saved")


@dataclass(frozen=True)
class Predicted:
    """A plan and its predictions, as documented in ``Plan``."""

    stages: tuple[Stage, ...]
    items: tuple[Item, ...]
    budget_bytes: int | None
    actions: tuple[Action, ...]
    forward_calls: tuple[int, ...]
    offloaded_bytes: int
    schedule: tuple[Event, ...]
    peak_bytes: int
    seconds: float


def amount(size: float) -> str:
    """Format a number of bytes, with at most three digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1000:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def table(plan: Predicted, all_kept: Predicted) -> str:
    """Return one line per group of blocks with the same treatment, and two lines of predictions compared with storing all."""
    rows = [HEADINGS, *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join((*left, *right)).rstrip())
    against = f", {plan.seconds / all_kept.seconds:.2f} times storing all" if all_kept.seconds > 0 else ""
    budget = "" if plan.budget_bytes is None else f" of a budget of {amount(plan.budget_bytes)}"
    moved = f"; {amount(plan.offloaded_bytes)} to the host and back" if plan.offloaded_bytes else ""
    lines += [
        f"predicted: {1e3 * plan.seconds:.4g} ms per forward and backward pass{against}; {sum(plan.forward_calls)} forward runs"
        f" of {len(plan.stages)} blocks{moved}",
        f"predicted peak: {amount(plan.peak_bytes)}{budget}; storing all takes {amount(all_kept.peak_bytes)}",
    ]
    return "\n".join(lines)


def _rows(plan: Predicted) -> Iterator[tuple[str, ...]]:
    for start, end, what in _groups(plan):
        stages, calls = plan.stages[start:end], plan.forward_calls[start:end]
        yield (
            stages[0].name if end - start == 1 else f"{stages[0].name} to {stages[-1].name}",
            what if end - start == 1 else what.replace("its own input", "their own inputs"),
            str(calls[0]) if min(calls) == max(calls) else f"{min(calls)} to {max(calls)}",
            f"{1e3 * sum(s.forward_seconds for s in stages):.4g}",
            f"{1e3 * sum(s.backward_seconds for s in stages):.4g}",
            amount(sum(s.saved_bytes for s in stages)),
        )


def _groups(plan: Predicted) -> list[tuple[int, int, str]]:
    """Return (start, end, treatment): consecutive blocks with the same treatment, and one Segment of several blocks each."""
    groups: list[tuple[int, int, str]] = []
    for item in plan.items:
        start, end = span(item)
        if isinstance(item, Keep):
            what = plan.actions[start].value
        else:
            source = "its own input" if end - start == 1 else f"the input of {plan.stages[start].name}"
            what = f"{Action.RECOMPUTE.value} from {source}{', in host memory' if item.offload else ''}"
        if groups and groups[-1][2] == what:
            start = groups.pop()[0]
        groups.append((start, end, what))
    return groups


def draw(plan: Predicted, path: str | Path) -> None:
    """See ``Plan.draw``."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("Plan.draw", "matplotlib", "bench"), name=error.name) from error
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_blocks(plan, left)
    _draw_bytes(plan, right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _draw_blocks(plan: Predicted, axes: "Axes") -> None:
    """Draw a bar per block, whose height is its number of forward runs."""
    for action in Action:
        blocks = [i for i, of_block in enumerate(plan.actions) if of_block is action]
        if blocks:
            axes.bar(
                blocks, [plan.forward_calls[i] for i in blocks], width=0.85, color=COLOURS[action], label=action.value
            )
    starts = [item.start for item in plan.items if isinstance(item, Segment)]
    if starts:
        axes.plot(starts, [0] * len(starts), "^", color=INK, markersize=5, clip_on=False, label="recomputed from here")
    n, most = len(plan.stages), max(plan.forward_calls)
    axes.set_xlim(-0.6, n - 0.4)
    axes.set_ylim(0, most + 1)
    axes.set_yticks(range(most + 1))
    step = max(1, -(-n // 12))
    axes.set_xticks(range(0, n, step), [plan.stages[i].name for i in range(0, n, step)], rotation=45 if n > 6 else 0)
    axes.set_ylabel("forward runs")
    axes.set_title("What happens to each block", fontsize=10)
    axes.legend(fontsize=8, ncols=2, loc="upper center", frameon=False)


def _draw_bytes(plan: Predicted, axes: "Axes") -> None:
    """Draw the bytes held over the schedule, the turn from forward to backward, and the budget."""
    events = plan.schedule
    highest = max(plan.peak_bytes, plan.budget_bytes or 0)
    unit, name = next((u for u in UNITS if highest >= u[0]), (1, "B"))
    edges = [1e3 * event.start_seconds for event in events] + [1e3 * events[-1].end_seconds]
    axes.stairs(
        [event.held_bytes / unit for event in events],
        edges,
        fill=True,
        color=COLOURS[Action.KEEP],
        alpha=0.75,
        label="held",
    )
    if any(event.copying_bytes for event in events):
        heights = [event.copying_bytes / unit for event in events]
        axes.stairs(heights, edges, fill=True, color=COLOURS[Action.OFFLOAD], label="of it, being copied")
    turn = max(event.end_seconds for event in events if event.kind == "forward")
    axes.axvline(1e3 * turn, color=INK, linestyle=":", linewidth=1, ymax=0.77, label="backward begins")
    if plan.budget_bytes is not None:
        axes.axhline(plan.budget_bytes / unit, color="#d55e00", linewidth=1.4, label="budget")
    axes.set_ylim(0, 1.3 * highest / unit or 1)
    axes.set_xlim(0, edges[-1] or 1)
    axes.set_xlabel("milliseconds, predicted")
    axes.set_ylabel(name)
    axes.set_title("Bytes that the chain holds, predicted", fontsize=10)
    axes.legend(fontsize=8, ncols=2, loc="upper center", frameon=False)
