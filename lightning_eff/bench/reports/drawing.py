"""Draw figures with matplotlib without global state, and export them as SVG and PNG.

Figures are drawn once, in dark colours without a background. Pages in dark mode invert them (``report_html.STYLE``).
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
    """A figure with its caption and its alternative text."""

    name: str
    caption: str
    alternative: str
    figure: "Figure"


def require_extra() -> None:
    """Check before hours of training that the report can be made.

    Raises:
        ModuleNotFoundError: if matplotlib or scipy is not installed.
    """
    for name in ("matplotlib", "scipy"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(missing("Benchmark", name, "bench"), name=error.name) from error


def svg(drawing: Drawing) -> bytes:
    """Return the figure as SVG without a background. The same input gives the same bytes."""
    return _saved(drawing, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def png(drawing: Drawing) -> bytes:
    """Return the figure as PNG on white."""
    return _saved(drawing, format="png", dpi=200, facecolor=PAPER, metadata={"Software": None})


def _saved(drawing: Drawing, **options: Any) -> bytes:
    buffer = BytesIO()
    with style():
        drawing.figure.savefig(buffer, **options)
    return buffer.getvalue()


def one(height: float) -> "tuple[Figure, Axes]":
    """Create a figure with one diagram, ``height`` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def grid_of(panels: int) -> "tuple[Figure, list[Axes]]":
    """Create a figure with ``panels`` diagrams, two per row, with shared axes. A cell that is left free has hidden axes."""
    from matplotlib.figure import Figure

    if panels == 1:
        figure, axes = one(3.2)
        return figure, [axes]
    rows = math.ceil(panels / 2)
    figure = Figure(figsize=(WIDTH, 0.7 + 1.35 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    every = [axes for row in grid for axes in row]
    for axes in every[panels:]:
        axes.axis("off")
        every[panels - 2].tick_params(labelbottom=True)  # the last diagram of its column
    return figure, every[:panels]


def label(text: str, size: int) -> str:
    """Shorten a name to a label on one line. Matplotlib would hide labels that begin with an underscore."""
    text = " ".join(text.split())
    text = text if len(text) <= size else text[: size - 1] + "…"
    return f"\u200b{text}" if text.startswith("_") else text


def style() -> AbstractContextManager[None]:
    """Return a context with the figures' settings instead of the user's."""
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
        "svg.fonttype": "path",  # readers may not have the font
        "svg.hashsalt": "lightning-eff",
    }
    settings |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    return rc_context(settings)
