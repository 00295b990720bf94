"""Write the bench's report: a text for the terminal, one HTML file, and its figures as PNG."""

import os
import textwrap
from pathlib import Path
from typing import Any

from lightning_eff.bench.reports import findings, words
from lightning_eff.bench.reports.drawing import png, require_extra
from lightning_eff.bench.reports.export import write_csvs
from lightning_eff.bench.reports.figures import draw
from lightning_eff.bench.reports.report_html import page
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import save

__all__ = ["require_extra", "table", "write", "write_html", "write_pngs"]

NARROWEST, WIDEST = 80, 160


def table(results: dict[str, Any], width: int = 100) -> str:
    """Format the results for a terminal: what to do, a row per arm, the verdicts, failed runs, and times.

    Columns that do not fit continue in a second block.

    Args:
        results: results of the bench's schema.
        width: the terminal's width in characters; 80 to 160 are used.
    """
    width = fitting(width)
    summary = summarize(results)
    unfinished = "" if results["finished"] else " (not finished: results so far)"
    parts = [wrapped(results["title"] + unfinished, width), wrapped(words.plan_line(results), width), ""]
    if advice := findings.advice(results, summary):
        parts += ["What to do", *(wrapped(line, width, bullet="- ") for line in advice), ""]
    parts += [grid(*words.cells(results, summary), width), ""]
    parts += [wrapped(own["sentence"], width, bullet="- ") for own in summary.values()]
    parts += ["", *(wrapped(line, width) for line in findings.lines(results, summary))]
    if rows := findings.unlike(results):
        parts += ["", words.APART, grid(words.UNLIKE, rows, width)]
    if failed := words.failures(summary):
        parts += ["", "Failed runs", *(wrapped(line, width, bullet="- ") for line in failed)]
    parts += [
        "",
        wrapped("Mean seconds per run; set-up, compilation and validation do not count against the budget", width),
    ]
    parts += [grid(*words.times(results, summary), width), "", wrapped(words.machine_line(results), width)]
    return "\n".join(parts) + "\n"


def grid(columns: list[words.Column], rows: list[dict[str, str]], width: int) -> str:
    """Format rows of text under their headings, in as many blocks as the width needs.

    Args:
        columns: the columns after the arm's name.
        rows: dicts with a text for ``arm`` and for each column's key.
        width: the width in characters.
    """
    names = [_cut(row["arm"], max(16, width // 4)) for row in rows]
    first = max(len(name) for name in [*names, "arm"])
    blocks: list[list[tuple[words.Column, int]]] = [[]]
    used = first
    for column in columns:
        size = max([len(column.head), *(len(row[column.key]) for row in rows)])
        if used + 2 + size > width and blocks[-1]:
            blocks.append([])
            used = first
        blocks[-1].append((column, min(size, width - first - 2)))
        used += 2 + size
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        head = "  ".join(["arm".ljust(first), *(column.head.ljust(size) for column, size in block)])
        lines += [head.rstrip(), "  ".join("─" * size for size in [first, *(size for _, size in block)])]
        for name, row in zip(names, rows, strict=True):
            texts = [_cut(row[column.key], size).ljust(size) for column, size in block]
            lines.append("  ".join([name.ljust(first), *texts]).rstrip())
    return "\n".join(lines)


def write(results: dict[str, Any], folder: Path, *, drawn: bool = True) -> None:
    """Write ``results.json``, CSV files and, if ``drawn``, the page and the figures into a folder.

    Args:
        results: results of the bench's schema, with their summary.
        folder: the folder, which is created.
        drawn: whether to draw, which needs matplotlib.
    """
    save(results, folder)
    write_csvs(results, folder)
    if drawn:
        write_html(results, folder / "report.html")
        write_pngs(results, folder / "figures")


def write_html(results: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the report as one self-contained file.

    Args:
        results: results of the bench's schema.
        path: the file to write; its folder is created.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    file = Path(path)
    text = page(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="\n")
    return file


def write_pngs(results: dict[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """Write the report's figures as PNG, on white, at 200 dots per inch.

    Args:
        results: results of the bench's schema.
        folder: the folder, which is created.

    Returns:
        The files, such as ``speedups.png``.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    target = Path(folder)
    drawings = draw(results, summarize(results))
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for drawing in drawings:
        files.append(target / f"{drawing.name}.png")
        files[-1].write_bytes(png(drawing))
    return files


def fitting(width: int) -> int:
    """Return the width to use in a terminal of this ``width``."""
    return min(max(width, NARROWEST), WIDEST)


def wrapped(text: str, width: int, bullet: str = "") -> str:
    """Wrap a sentence to lines of at most ``width``, indented behind its bullet."""
    clean = " ".join(text.split())
    return textwrap.fill(clean, width, initial_indent=bullet, subsequent_indent=" " * len(bullet))


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"
