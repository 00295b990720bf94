"""A picture of a simulated step: the operations of every pipeline rank, in whole and around the first backward pass."""

from pathlib import Path
from typing import Any

from lightning_eff.planner._launch.arguments import NO_MATPLOTLIB
from lightning_eff.planner.evaluator import Candidate
from lightning_eff.planner.simulation import Timeline

_COLOURS = {"F": "#4C72B0", "B": "#DD8452", "I": "#DD8452", "W": "#55A868"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_MATPLOTLIB) from error


def draw(path: Path, title: str, candidate: Candidate, line: Timeline) -> None:
    """Write the picture as PNG.

    Args:
        path: path of the file; missing folders are created.
        title: title of the picture.
        candidate: the simulated layout.
        line: its timeline, which can have fewer micro-batches than the step.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(line.ops)
    figure = Figure(figsize=(14, min(3.0 + 0.28 * ranks * 2, 24)), layout="constrained")
    FigureCanvasAgg(figure)
    whole, near = figure.subplots(2, 1)
    last = max(end for ops in line.ops for _, _, end in ops)
    turn = min(start for ops in line.ops for op, start, _ in ops if op.kind in "BI")
    longest = max(end - start for ops in line.ops for _, start, end in ops)
    around = (max(0.0, turn - 8 * longest), min(last, turn + 8 * longest))
    for axes, window in ((whole, (0.0, last)), (near, around)):
        _bars(axes, line, window, numbers=axes is near)
    done = max(op.microbatch for op, _, _ in line.ops[0]) + 1
    of = candidate.layout.num_microbatches
    whole.set_title(
        f"{title}\n{candidate.seconds:.4g} s per step, bubble {candidate.bubble:.1%}, MFU {candidate.mfu:.1%}"
    )
    whole.set_xlabel("seconds" + (f"; {done} of {of} micro-batches are shown" if done < of else ""))
    near.set_xlabel("seconds, around the first backward pass; numbers are micro-batches")
    kinds = [kind for kind in _NAMES if any(op.kind == kind for ops in line.ops for op, _, _ in ops)]
    figure.legend(handles=[Patch(color=_COLOURS[k], label=_NAMES[k]) for k in kinds], loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def _bars(axes: Any, line: Timeline, window: tuple[float, float], *, numbers: bool) -> None:
    begin, until = window
    for rank, ops in enumerate(line.ops):
        for kind, colour in _COLOURS.items():
            bars = [
                (start, end - start) for op, start, end in ops if op.kind == kind and end >= begin and start <= until
            ]
            edges = 0.4 if numbers else 0.0
            axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colour, edgecolors="white", linewidth=edges)
        if numbers and len(line.ops) <= 16:
            for op, start, end in ops:
                if start >= begin and end <= until and end - start > (until - begin) / 150:
                    axes.text((start + end) / 2, rank, str(op.microbatch), ha="center", va="center", fontsize=6)
    axes.set_xlim(begin, until)
    axes.set_ylim(len(line.ops) - 0.5, -0.5)
    axes.set_ylabel("rank of the pipeline")
    axes.yaxis.get_major_locator().set_params(integer=True)
