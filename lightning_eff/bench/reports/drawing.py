"""A figure of the report and how it leaves matplotlib: as SVG for the page and as PNG, without global state.

It is drawn once, dark on nothing; a page on dark ground turns its light and dark round (``report_html.STYLE``).
"""

import importlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from lightning_eff._core._lightning.extras import missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.2  #: inches
INK, PAPER, GRID = "#1b1f24", "#ffffff", "#d5d9de"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito 2008


@dataclass
class Drawing:
    """A figure with what is said beside it and instead of it."""

    name: str
    caption: str
    alternative: str
    figure: "Figure"


def require_extra() -> None:
    """Raise at once, rather than after hours of training, if the report cannot be made.

    Raises:
        ModuleNotFoundError: matplotlib or scipy is not installed.
    """
    for name in ("matplotlib", "scipy"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(missing("Benchmark", name, "bench"), name=error.name) from error


def svg(drawing: Drawing) -> bytes:
    """The figure as an SVG of its own, without a ground: the same bytes for the same input."""
    return _saved(drawing, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def png(drawing: Drawing) -> bytes:
    """The figure as a PNG on white."""
    return _saved(drawing, format="png", dpi=200, facecolor=PAPER, metadata={"Software": None})


def _saved(drawing: Drawing, **options: Any) -> bytes:
    buffer = BytesIO()
    with style():
        drawing.figure.savefig(buffer, **options)
    return buffer.getvalue()


def one(height: float) -> "tuple[Figure, Axes]":
    """A figure of one diagram, ``height`` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def grid_of(panels: int) -> "tuple[Figure, list[Axes]]":
    """A figure of ``panels`` diagrams, two in a row, that share their axes."""
    from matplotlib.figure import Figure

    if panels == 1:
        figure, axes = one(3.2)
        return figure, [axes]
    rows = math.ceil(panels / 2)
    figure = Figure(figsize=(WIDTH, 0.7 + 1.35 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    every = [axes for row in grid for axes in row]
    for axes in every[panels:]:
        axes.set_visible(False)
    return figure, every[:panels]


def label(text: str, size: int) -> str:
    """A name as a label: cut, on one line, and not hidden as matplotlib hides labels that begin with an underscore."""
    text = " ".join(text.split())
    text = text if len(text) <= size else text[: size - 1] + "…"
    return f"\u200b{text}" if text.startswith("_") else text


def style() -> AbstractContextManager[None]:
    """The figures' own settings, whatever the user's are; put back at the end."""
    from matplotlib import rc_context, rcParamsDefault

    settings: Any = {
        name: value for name, value in rcParamsDefault.items() if not name.startswith(("backend", "interactive"))
    }
    settings |= {
        "font.size": 9,
        "font.sans-serif": ["DejaVu Sans"],
        "legend.fontsize": 8,
        "legend.frameon": False,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "axes.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "text.parse_math": False,
        "svg.fonttype": "path",  # as it was laid out, whatever fonts the reader has
        "svg.hashsalt": "lightning-eff",
    }
    settings |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    return rc_context(settings)
